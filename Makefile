# make program | build | demo | test | bench | asan | tsan | format | clean
#
# Each target installs what it is missing (scripts/setup) and needs nothing but make, git and root
# on a fresh Debian 12.
# TORCH names the CMake folder of a PyTorch to build against, where python3 imports none or another;
# FLAGS are more arguments for cmake, for example -DLEEWAY_WERROR=ON; SKIPS an extended regular expression
# of the reasons for which `make test` lets a test be skipped (any, by default).
BUILD ?= build
JOBS ?= $(shell nproc)

.PHONY: build program demo test bench asan tsan format clean

# Configured anew each time, which takes seconds: packages may have come since. What it had to leave
# out (kernels without nvcc, operators without torch) is said.
configure = cmake --preset release -B $(BUILD) $(if $(TORCH),-DCMAKE_PREFIX_PATH=$(TORCH)) $(FLAGS) \
  > $(BUILD)-configure.log || \
  { cat $(BUILD)-configure.log; rm -f $(BUILD)/build.ninja; exit 1; }; \
  sed -n 's/^-- \(No .*\)/\1/p' $(BUILD)-configure.log; rm -f $(BUILD)-configure.log

build:
	@scripts/setup build
	@$(configure)
	@ninja -C $(BUILD) -j $(JOBS)

# The program alone, without tests. It uses torch for GPUs only, and is built without where there is none.
program:
	@scripts/setup program
	@$(configure)
	@ninja -C $(BUILD) -j $(JOBS) leeway

demo: program
	$(BUILD)/leeway train
	@command -v leeway > /dev/null || echo 'For these commands: export PATH="$(abspath $(BUILD)):$$PATH"' >&2

test: build
	@scripts/run_tests $(BUILD) $(JOBS) $(if $(SKIPS),'$(SKIPS)')

bench:
	@scripts/setup bench
	@cmake --preset release -B $(BUILD)-bench -DLEEWAY_BENCHMARKS=ON > /dev/null
	@ninja -C $(BUILD)-bench -j $(JOBS) loss_benchmark tokenizer_benchmark policy_benchmark \
	  loop_benchmark ranks_benchmark ranks_sampling_benchmark leeway
	@scripts/run_benchmarks $(BUILD)-bench

# Sanitizers, over what they can find something in: address and undefined behaviour in whatever reads
# files, in the core, the engine and the server; races in pool, engine, scheduler, loop, background writer,
# ranks, their sampling and server.
# Only these programs are built, and PROGRAMS names others.
asan: PROGRAMS ?= base_test config_test config_dump_test config_problems_test text_test model_test \
  report_test fuzz_test gguf_test gguf_fuzz_test safetensors_fuzz_test core_test policy_head_test engine_test \
  ranks_test gloo_ranks_test
tsan: PROGRAMS ?= base_test engine_test orchestrator_loop_test failure_modes_test background_writer_test \
  ranks_test ranks_sampler_test server_test
asan tsan:
	@scripts/setup program
	@cmake --preset $@ $(FLAGS) > /dev/null
	@ninja -C build-$@ -j $(JOBS) sanitizer_proof $(PROGRAMS)
	@scripts/run_sanitized build-$@ $(JOBS) $(PROGRAMS)

format:
	@command -v clang-format > /dev/null || scripts/setup format
	@git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf $(BUILD) $(BUILD)-bench build-asan build-tsan
