#!/bin/sh
# Trains with two servers, kills one of them with signal 9 after ten steps, and goes on: the run
# starts it again, gives it the current weights and uses it.
#   sh examples/05_pool/lose_one.sh [options of leeway train]
set -eu
leeway=${LEEWAY:-leeway}
"$leeway" train examples/05_pool/config.toml --spawn-servers 2 "$@" &
run=$!
server=
# The first process that the run has started, once it has made ten steps.
while kill -0 $run 2>/dev/null; do
  sleep 0.2
  steps=$(cat runs/pool/metrics.jsonl 2>/dev/null | wc -l)
  [ "$steps" -ge 10 ] || continue
  for stat in /proc/[0-9]*/stat; do
    read -r pid _ _ parent _ < "$stat" 2>/dev/null || continue
    [ "$parent" = "$run" ] && server=$pid && break
  done
  break
done
[ -n "$server" ] && echo "killing the server process $server" >&2 && kill -9 "$server"
wait $run
