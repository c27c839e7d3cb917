# mptrain: the programs, the tests, the installation. `make help` lists the targets.
#
# Variables, all settable on the command line:
#   CC, CXX      compilers                          (cc, g++)
#   CFLAGS       optimisation and machine flags     (-O2)
#   WARNINGS     diagnostics of our own builds      (all of them, as errors)
#   ZLIB         1: compressed records through zlib; 0: without zlib
#   PREFIX       where `make install` puts things   (/usr/local), below DESTDIR
#   NO_INSTALL   1: `make test` installs no package; it names what is missing and stops
#   CUDA_HOME    where the CUDA toolkit is           (/usr/local/cuda)
#   CUDA_ARCHS   GPU architectures of `make cuda`; those that nvcc doesn't know are left out

PROGRAMS := tfrecord train predict bench
LESSONS  := $(sort $(notdir $(basename $(wildcard examples/[0-9]*.c))))
TESTS    := $(sort $(notdir $(basename $(wildcard tests/test_*.c))))

CFLAGS     ?= -O2
WARNINGS   ?= -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes -Werror
ZLIB       ?= 1
PREFIX     ?= /usr/local
NO_INSTALL ?=
BUILD      ?= build
CUDA_HOME  ?= /usr/local/cuda
CUDA_ARCHS ?= 70 75 80 86 89 90 90a

zlib_flags_1 := -DMPTRAIN_ZLIB
zlib_libs_1  := -lz
ALL_CFLAGS   := $(strip $(WARNINGS) $(CPPFLAGS) $(CFLAGS) $(zlib_flags_$(ZLIB)) -I. -Iexamples)
ALL_LIBS     := $(strip $(LDFLAGS) $(zlib_libs_$(ZLIB)) -lm -lpthread $(LDLIBS))
COMPILE       = $(CC) $(ALL_CFLAGS) $< -o $@ $(ALL_LIBS)
# At -O1 the compiler takes half the time, and the tests are many; the programs get -O2.
COMPILE_TEST  = $(CC) $(ALL_CFLAGS:-O2=-O1) $< -o $@ $(ALL_LIBS)

HEADERS := mptrain.h $(wildcard examples/*.h examples/*/*.h)
VERSION  = $(shell sed -n 's/^.define MPT_VERSION_STRING "\(.*\)"/\1/p' mptrain.h)

# The scripts get our variables through the environment and start makes of their own.
SCRIPT_ENV := MAKEFLAGS= CC='$(CC)' CXX='$(CXX)' CFLAGS='$(CFLAGS)' WARNINGS='$(WARNINGS)' \
              ZLIB='$(ZLIB)' NO_INSTALL='$(NO_INSTALL)' PROGRAMS='$(PROGRAMS)'

MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all
.PHONY: all tests examples demo bench test test-full asan ubsan tsan style cuda check-arch \
        device-check emulate emulated-tests install clean help FORCE

# ---- building ------------------------------------------------------------------------------------

all: $(PROGRAMS:%=$(BUILD)/%) ## the programs, into build/ (this is what plain `make` does)

examples: all $(LESSONS:%=$(BUILD)/%) ## the programs and the numbered lessons, into build/

tests: $(TESTS:%=$(BUILD)/tests/%)

$(BUILD)/tests/%: tests/%.c $(wildcard tests/*.h) $(HEADERS) $(BUILD)/flags
	@mkdir -p $(@D) && rm -f $@
	$(COMPILE_TEST)

$(BUILD)/%: examples/%.c $(HEADERS) $(BUILD)/flags
	@rm -f $@
	$(COMPILE)

# Changes when a flag does, so that `make ZLIB=0` after `make` builds anew.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(ALL_CFLAGS) $(ALL_LIBS)' > $@.new
	@cmp -s $@.new $@ || { CC='$(CC)' ZLIB='$(ZLIB)' tests/setup.sh build && cp $@.new $@; }
	@rm -f $@.new

# ---- testing -------------------------------------------------------------------------------------

test: ## all tests, the compile matrix and the style checks: under five minutes on two cores
	@$(SCRIPT_ENV) tests/setup.sh test
	@$(SCRIPT_ENV) tests/run.sh quick

test-full: ## the same with the long loops, and again under the three sanitizers
	@$(SCRIPT_ENV) tests/setup.sh test demo asan ubsan tsan
	@$(SCRIPT_ENV) MPT_TEST_FULL=1 tests/run.sh quick asan ubsan tsan

asan: ## the tests under AddressSanitizer, leaks included
ubsan: ## the tests under UndefinedBehaviorSanitizer
tsan: ## the tests under ThreadSanitizer
asan ubsan tsan:
	@$(SCRIPT_ENV) tests/setup.sh $@
	@$(SCRIPT_ENV) tests/run.sh $@

style: ## line and function lengths, chapter tags, exported symbols
	@$(SCRIPT_ENV) tests/style.sh

demo: ## Fashion-MNIST from files to a trained network: two minutes or so on two cores
	@$(SCRIPT_ENV) BUILD='$(BUILD)' examples/demo.sh

bench: $(BUILD)/bench ## measure the data path and training on this machine
	@for kind in crc records decode input layers step; do $(BUILD)/bench $$kind || exit 1; done

# ---- CUDA ----------------------------------------------------------------------------------------

# Machine code for each architecture that this nvcc knows, and PTX of the newest for GPUs to come.
# (PTX of 90a would run on 90a alone.)
NVCC        = $(CUDA_HOME)/bin/nvcc
NVCC_FLAGS ?= -O3 -std=c++17 -lineinfo --threads 0 -Wno-deprecated-gpu-targets
nvcc_knows  = $(shell $(NVCC) --list-gpu-arch 2> /dev/null | sed 's/compute_//')
cuda_archs  = $(foreach a,$(CUDA_ARCHS),$(if $(filter $(a:%a=%),$(nvcc_knows)),$(a)))
cuda_newest = $(lastword $(filter-out %a,$(cuda_archs)))
NVCC_CODE   = $(foreach a,$(cuda_archs),-gencode arch=compute_$(a),code=sm_$(a)) \
              -gencode arch=compute_$(cuda_newest),code=compute_$(cuda_newest)
CUDA_CFLAGS = -DMPTRAIN_CUDA -isystem $(CUDA_HOME)/include
CUDA_LIBS   = -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublas -lcudart_static \
              -lstdc++ -ldl -lrt
have_nvcc   = $(wildcard $(CUDA_HOME)/bin/nvcc)

cuda: $(BUILD)/kernels.o $(BUILD)/train-cuda ## kernels.o and train-cuda with nvcc, into build/

# What ptxas says of each kernel goes into kernels.log; its warnings and nvcc's are shown.
$(BUILD)/kernels.o: kernels.cu mptrain.h $(BUILD)/cuda-flags
	@echo '$(NVCC) $(NVCC_FLAGS) [sm: $(cuda_archs)] -c kernels.cu -o $@'
	@$(NVCC) $(NVCC_FLAGS) $(NVCC_CODE) -Xptxas -v -c kernels.cu -o $@ 2> $(BUILD)/kernels.log || \
	    { grep -v -e 'ptxas info' -e 'bytes stack frame' $(BUILD)/kernels.log >&2; exit 1; }
	@! grep -v -e 'ptxas info' -e 'bytes stack frame' $(BUILD)/kernels.log >&2 || true

$(BUILD)/train-cuda: examples/train.c $(BUILD)/kernels.o $(HEADERS) $(BUILD)/flags
	@rm -f $@
	$(CC) $(ALL_CFLAGS) $(CUDA_CFLAGS) $< $(BUILD)/kernels.o -o $@ $(CUDA_LIBS) $(ALL_LIBS)

$(BUILD)/cuda-flags: FORCE
	@test -x $(NVCC) || { echo 'make: no nvcc in $(CUDA_HOME)/bin: install the CUDA toolkit, or' \
	    'tell where it is: make CUDA_HOME=/path/to/cuda' >&2; exit 1; }
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVCC_FLAGS) $(NVCC_CODE)' > $@.new
	@cmp -s $@.new $@ || cp $@.new $@
	@rm -f $@.new

check-arch: $(if $(have_nvcc),$(BUILD)/kernels.o) ## what each kernel takes; needs no GPU
	@$(SCRIPT_ENV) $(if $(have_nvcc),NVCC_LOG=$(BUILD)/kernels.log) tests/check_arch.sh

device-check: ## all kernel tests and benchmarks on this machine's GPU: at most eight minutes
	@$(SCRIPT_ENV) CUDA_HOME='$(CUDA_HOME)' tests/device_check.sh

# Programs of tests/cuda/ for a GPU. cuDNN is what one of them compares with, where its header is.
CUDNN_HOME  ?= $(patsubst %/include/cudnn.h,%,$(firstword $(wildcard $(CUDA_HOME)/include/cudnn.h \
                                                                     /usr/include/cudnn.h)))
CUDNN_DIRS   = $(wildcard $(CUDNN_HOME)/lib64 $(CUDNN_HOME)/lib)
CUDNN_FLAGS  = $(if $(CUDNN_HOME),-DBENCH_CUDNN -isystem $(CUDNN_HOME)/include)
CUDNN_LIBS   = $(if $(CUDNN_HOME),$(foreach d,$(CUDNN_DIRS),-L$(d) -Wl,-rpath,$(d)) -lcudnn)

$(BUILD)/cuda/bench_device: tests/cuda/bench_device.c $(BUILD)/kernels.o $(HEADERS) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $(CUDA_CFLAGS) $(CUDNN_FLAGS) $< $(BUILD)/kernels.o -o $@ \
	    $(CUDNN_LIBS) $(CUDA_LIBS) $(ALL_LIBS)

$(BUILD)/cuda/%: tests/cuda/%.c $(BUILD)/kernels.o $(wildcard tests/*.h tests/cuda/*.h) $(HEADERS) \
                 $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) $(CUDA_CFLAGS) -Itests $< $(BUILD)/kernels.o -o $@ $(CUDA_LIBS) $(ALL_LIBS)

# ---- CUDA on the CPU -----------------------------------------------------------------------------

# The runner in tests/cuda_on_cpu/ takes the place of CUDA's headers, of the runtime and of cuBLAS.
# What a program does on sm_70 is in sm_70/, and so on: these have engines of their own.
RUNNER         := tests/cuda_on_cpu
ON_CPU         := $(BUILD)/cuda_on_cpu
EMULATED_ARCHS ?= 70 75 80
CUDA_TESTS     := $(notdir $(basename $(wildcard tests/cuda/test_*.c)))
runner_main    := $(RUNNER)/test_% $(RUNNER)/bugs%
RUNNER_OBJS    := $(patsubst $(RUNNER)/%.cpp,$(ON_CPU)/%.o, \
                    $(filter-out $(runner_main),$(wildcard $(RUNNER)/*.cpp)))
RUNNER_FILES   := $(wildcard $(RUNNER)/*.h $(RUNNER)/include/*.h)
machine_x86_64 := -mavx2 -mfma -mf16c
# Half memory is read as uint4 in kernels.cu, as nvcc allows; -ffp-contract=off: no FMA but fmaf.
RUNNER_FLAGS    = -std=c++17 $(CFLAGS) -g -fno-strict-aliasing -ffp-contract=off \
                  $(machine_$(shell uname -m)) -I. -I$(RUNNER)/include
DEVICE_FLAGS    = -x c++ -include $(RUNNER)/device.h

emulate: $(ON_CPU)/sm_80/emulate ## train small networks with kernels.cu run by the CPU
	$<

emulated-tests: $(foreach a,$(EMULATED_ARCHS),$(CUDA_TESTS:%=$(ON_CPU)/sm_$(a)/%))

$(ON_CPU)/%.o: tests/%.c $(HEADERS) $(wildcard tests/*.h) $(RUNNER_FILES) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DMPTRAIN_CUDA -I$(RUNNER)/include -c $< -o $@

$(ON_CPU)/%.o: tests/cuda/%.c $(HEADERS) $(wildcard tests/*.h tests/cuda/*.h) $(RUNNER_FILES) \
               $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS:-O2=-O1) -DMPTRAIN_CUDA -Itests -I$(RUNNER)/include -c $< -o $@

$(ON_CPU)/%.o: examples/%.c $(HEADERS) $(RUNNER_FILES) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -DMPTRAIN_CUDA -I$(RUNNER)/include -c $< -o $@

$(ON_CPU)/%.o: $(RUNNER)/%.cpp $(RUNNER_FILES) $(wildcard $(RUNNER)/runtime/*) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CXX) $(RUNNER_FLAGS) -Wall -Wextra -c $< -o $@

define emulated_arch
$(ON_CPU)/sm_$(1)/kernels.o: kernels.cu mptrain.h $(RUNNER_FILES) $(BUILD)/flags
	@mkdir -p $$(@D)
	$$(CXX) $$(RUNNER_FLAGS) -DMPTK_EMULATED_ARCH=$(1)0 $$(DEVICE_FLAGS) -c $$< -o $$@

$(ON_CPU)/sm_$(1)/%: $(ON_CPU)/%.o $(ON_CPU)/sm_$(1)/kernels.o $(RUNNER_OBJS)
	$$(CXX) $$(CFLAGS) $$^ -o $$@ $$(LDFLAGS) $$(ALL_LIBS)
endef
$(foreach a,$(EMULATED_ARCHS),$(eval $(call emulated_arch,$(a))))
.PRECIOUS: $(ON_CPU)/%.o

# ---- installing ----------------------------------------------------------------------------------

# Programs with short names such as `bench` get the prefix mptrain- in a shared bin directory.
install: all ## mptrain.h, mptrain.pc and the programs (as mptrain-NAME) under PREFIX
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 644 mptrain.h $(DESTDIR)$(PREFIX)/include/mptrain.h
	for p in $(PROGRAMS); do install $(BUILD)/$$p $(DESTDIR)$(PREFIX)/bin/mptrain-$$p || exit 1; done
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' mptrain.pc.in \
	    > $(DESTDIR)$(PREFIX)/lib/pkgconfig/mptrain.pc

# A BUILD other than build/ must hold what we put there, so that a slip costs nobody a directory.
clean: ## remove build/, or the BUILD that is given
	@case '$(BUILD)' in build) ;; *) test ! -e '$(BUILD)' || test -e '$(BUILD)/flags' || { \
	    echo "make: $(BUILD) is no build directory of ours: not removed" >&2; exit 1; } ;; esac
	rm -rf -- '$(BUILD)'

help: ## this list
	@echo 'Targets:'
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1:/p' Makefile | awk -F: '{printf "  %-13s %s\n", $$1, \
	    substr($$0, length($$1) + 2)}'
	@echo 'Variables:'
	@sed -n 's/^#   \([A-Z]\)/  \1/p' Makefile
