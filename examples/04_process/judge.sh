#!/bin/sh
# The same task as judge.py in plain sh, with a reward of 1 for the whole answer. JSON escapes
# quotes inside strings, so cutting at `"key": ` cannot be misled by them.
while read -r line; do
  case $line in
    *'"type": "hello"'*) echo '{"type": "hello", "protocol": 1}'; continue ;;
  esac
  id=${line#*'"id": '} id=${id%%,*}
  first=${line#*'"first": "'} first=${first%%'"'*}
  last=${line#*'"last": "'} last=${last%%'"'*}
  reply=${line##*'"reply": {"text": "'} reply=${reply%%'", "content": '*}
  after=abcdefghijklmnopqrstuvwxyz
  after=${after#*"$first"}
  wanted=$first${after%%"$last"*}$last'\n'
  if [ "$reply" = "$wanted" ]; then reward=1; else reward=0; fi
  echo "{\"id\": $id, \"reward\": $reward}"
done
