// Small programs of protocol 2 for tests, in Python, and a driver with a real process behind it.
#pragma once

#include <string>

#include "orchestrator/environment_test_support.h"
#include "orchestrator/fake_system.h"
#include "orchestrator/process_test_support.h"

namespace leeway::testing {

// Reads lines and calls `on(message)`, with say(**members), ask(episode, id, *contents, **more) and
// done(episode, **members) at hand. `body` defines `on`; `hello` is what the hello has besides type
// and protocol.
inline std::string asking_program(const std::string& body,
                                  const std::string& hello = "'train': 5, 'eval': 3") {
  return R"(import json, os, sys, time
def write(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
def say(**members):
    write(json.dumps(members))
def user(content):
    return {"role": "user", "content": content}
def ask(episode, id, *contents, **more):
    say(type="sample", episode=episode, id=id, messages=[user(c) for c in contents], **more)
def done(episode, **members):
    say(type="done", episode=episode, **members)
)" + body +
         R"(
sys.stdin.readline()
say(type="hello", protocol=2, **{)" +
         hello + R"(})
for line in sys.stdin:
    on(json.loads(line))
)";
}

}  // namespace leeway::testing
