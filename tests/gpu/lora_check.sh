#!/usr/bin/env bash
# An adapter on a GPU, by the program: a base is made on the CPU, then an adapter over it is trained
# on-policy, gone on with, used, and served. Fails unless sampler and trainer agree in every bit, and
# the server with the program.
#   tests/gpu/lora_check.sh LEEWAY FOLDER [DEVICE]
set -euo pipefail
leeway=$1 folder=$2 device=${3:-cuda}
rm -rf "$folder"
mkdir -p "$folder"
"$leeway" train --set output_dir="$folder/base" --set model.head_dim=32 --set trainer.max_steps=1 \
  --set eval.every=0 --set eval.prompts=32 > "$folder/base.txt" 2>&1
cat > "$folder/lora.toml" <<TOML
output_dir = "$folder/run"
[model]
path = "$folder/base/weights/step_1"
tokenizer = "byte"
device = "$device"
[model.lora]
[[environment]]
name = "sort"
[trainer]
max_steps = 20
[trainer.loss]
preset = "icepop"
[orchestrator]
max_off_policy_steps = 0
[rollout]
max_new_tokens = 12
stop = "\n"
[eval]
every = 0
prompts = 32
[checkpoint]
every = 10
TOML
"$leeway" train "$folder/lora.toml"
"$leeway" train --resume "$folder/run" --set trainer.max_steps=25
adapter=$folder/run/weights/step_25
"$leeway" generate "$folder/base/weights/step_1" --adapter "$adapter" --device "$device" --prompt "dbca=" \
  --temperature 0 --max-new-tokens 6
precision=float32
[ "$device" = cpu ] || precision=bf16
"$leeway" logprobs "$adapter" --device "$device" --precision "$precision" --text "dbca=abcd"
"$leeway" eval "$folder/lora.toml" --adapter "$adapter"

# The same greedy tokens by a server of the base that is handed the adapter.
greedy=(--prompt "dbca=" --temperature 0 --max-new-tokens 6 --json)
common=(--tokenizer byte --device "$device" --precision "$precision" --kv-bytes 268435456)
"$leeway" generate "$folder/base/weights/step_1" --adapter "$adapter" "${common[@]}" "${greedy[@]}" \
  > "$folder/generated.json"
"$leeway" serve "$folder/base/weights/step_1" "${common[@]}" --name base --port 0 --weights-root "$folder/run" \
  2> "$folder/serve.txt" &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
for _ in $(seq 600); do
  if grep -q 'listening on' "$folder/serve.txt" || ! kill -0 "$server" 2> /dev/null; then break; fi
  sleep 0.1
done
url=$(sed -n 's/.*listening on \(http[^ ]*\).*/\1/p' "$folder/serve.txt" | head -n 1)
[ -n "$url" ] || { cat "$folder/serve.txt"; exit 1; }
python3 - "$url" "$adapter" "$folder/generated.json" <<'PYTHON'
import array, json, sys, urllib.request
url, adapter, generated = sys.argv[1:]

def post(path, **body):
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)

# One prints the shortest decimal of a float32, the other nine digits.
def float32(values):
    return array.array("f", values)

def complete(model):
    reply = post("/v1/completions", model=model, prompt="dbca=", temperature=0, max_tokens=6, logprobs=1)
    return reply["choices"][0]["text"], float32(reply["choices"][0]["logprobs"]["token_logprobs"])

base = complete("base")
post("/v1/load_lora_adapter", lora_name="sorter", lora_path=adapter)
text, logprobs = complete("sorter")
expected = json.load(open(generated))
same = text == expected["text"] and logprobs == float32(expected["logprobs"])
post("/v1/unload_lora_adapter", lora_name="sorter")
unloaded = complete("base")
print(f"served {text!r}, {len(logprobs)} log-probabilities, as generate gives them: {same}; "
      f"not the base's: {logprobs != base[1]}; the base's after unloading: {unloaded == base}")
sys.exit(0 if same and logprobs and logprobs != base[1] and unloaded == base else 1)
PYTHON
kill -TERM "$server"
code=0
wait "$server" || code=$?
trap - EXIT
echo "the server ended with $code"
[ "$code" -eq 0 ] || { cat "$folder/serve.txt"; exit 1; }

python3 "$(dirname "$0")/steps_check.py" "$folder/run/metrics.jsonl" 25 zero
