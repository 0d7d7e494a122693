# make            build/train_gpt for the cpu, and for the GPU too where nvcc and one are; CUDA= leaves that out
# make cuda       for both, whatever is here; RELEASE=1: for every GPU from sm_80 on, not only the one here
# make demo       train on real text, two minutes           make bench   speed and memory
# make test       every test                                make SANITIZE=1 test   with ASan and UBSan
# make fuzz       each parser on hostile input by libFuzzer, FUZZ_SECONDS each
# make emu        build/emu/train_gpt, the CUDA source on the host     make ptxas   each kernel's registers and spills
MAKEFLAGS += --no-builtin-rules # which would try to link a dependency file
CC ?= gcc
CXX ?= g++
ARCH ?= native
JOBS ?= $(shell nproc)
B := build$(if $(SANITIZE),/sanitize)

MULTIARCH := $(shell $(CC) -print-multiarch)

# What scripts/setup.sh --into .deps unpacked comes before what the system has. Its libraries need each other, and an
# RPATH, unlike a RUNPATH, counts for them too.
DEPS := $(wildcard $(CURDIR)/.deps/usr)
ifneq ($(DEPS),)
  DEPS_LIB := $(DEPS)/lib/$(MULTIARCH)
  DEFINES += -isystem $(DEPS)/include -isystem $(DEPS)/include/$(MULTIARCH)
  LDFLAGS += -L$(DEPS_LIB) -Wl,--disable-new-dtags,-rpath,$(DEPS_LIB),-rpath,$(DEPS_LIB)/openblas-openmp
endif

has = $(shell printf '\043include <$(1)>\n' | $(CC) $(DEFINES) -E -x c - >/dev/null 2>&1 && echo yes)
# Needed: JSON, checksums of checkpoints, the patterns by which tokenizers split text.
DEFINES += -DPCRE2_CODE_UNIT_WIDTH=8
RUNTIME_LDLIBS := -ljansson -lpcre2-8 -lm
LDLIBS += $(RUNTIME_LDLIBS)
MISSING := $(strip $(foreach h,jansson.h xxhash.h pcre2.h,$(if $(call has,$h),,$h)))
# Used where its header is found; without any of them the plain OpenMP loops remain.
ifeq ($(call has,oneapi/dnnl/dnnl.h),yes)
  DEFINES += -DHAVE_ONEDNN
  LDLIBS += -ldnnl
endif
# Debian keeps each BLAS in its own folder, so that /usr/include/cblas.h may be any of them.
OPENBLAS_INCLUDE ?= $(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/include/$(MULTIARCH)/openblas-openmp $r/include/openblas)))
ifneq ($(OPENBLAS_INCLUDE),)
  DEFINES += -DHAVE_OPENBLAS -I$(OPENBLAS_INCLUDE)
  LDLIBS += $(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/lib/$(MULTIARCH)/openblas-openmp/libopenblas.so)) -lopenblas)
endif

# MPI, by what its compiler mpicc adds; MPI= leaves it out or names another mpicc. What calls none of it loads none.
MPI ?= mpicc
MPI_SHOW := $(if $(MPI),$(shell $(MPI) -show 2>/dev/null))
ifneq ($(MPI_SHOW),)
  MPI_FLAGS := -DHAVE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_SHOW)))
  DEFINES += $(MPI_FLAGS)
  LDFLAGS += $(filter-out %-new-dtags,$(filter -L% -Wl%,$(MPI_SHOW))) -Wl,--as-needed
  RUNTIME_LDLIBS += $(filter -l%,$(MPI_SHOW))
endif

# No -ffast-math: NaN must stay NaN. Reductions that may be reordered say so by `omp simd`.
CFLAGS ?= -O3 -g
CFLAGS += -march=$(ARCH) -mprefer-vector-width=512 -fopenmp -fno-math-errno -fno-trapping-math
WARNINGS := -Wall -Wextra -Werror -Wno-unused-parameter -Wno-unused-function -Wno-missing-field-initializers
CPPFLAGS += -I. $(DEFINES) -D_GNU_SOURCE -MMD -MP
ifdef SANITIZE
  CFLAGS += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
COMPILE = $(CC) -std=gnu11 $(CPPFLAGS) $(CFLAGS) $(WARNINGS)
PRECISION_fp32 :=
PRECISION_bf16 := -DPRECISION_BF16
# bf16 with the AMX tiles emulated, so that kernels written on them run everywhere
PRECISION_amx := -DPRECISION_BF16 -DAMX_EMULATE

# ---- CUDA: looked for where it is wanted ----
NVCC := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME:=/bin/nvcc)) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
GPU := $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L >/dev/null 2>&1 && echo yes))
CUDA ?= $(if $(SANITIZE),,$(and $(NVCC),$(GPU),yes))
ifneq ($(CUDA),)
  ifeq ($(NVCC),)
    $(error no nvcc in CUDA_HOME, PATH or /usr/local/cuda; make CUDA= builds for the cpu alone)
  endif
  # A toolkit's folders, the system's, or those of the nvidia wheels that PyTorch comes with; CUBLASLT_DIR= names another,
  # NCCL_HOME= one for NCCL.
  WHEELS := $(shell python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null)
  CUDA_DIRS := $(CUDA_HOME) $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))) /usr/local/cuda /usr $(foreach w,$(WHEELS),$w/cu13 $w/cublas $w/nvtx $w/nccl)
  find_include = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(patsubst %/$(1),%,$(wildcard $d/include/$(1)))))
  find_library = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(foreach l,lib64 lib lib/$(MULTIARCH) targets/x86_64-linux/lib, \
    $(wildcard $d/$l/$(1).so $d/$l/$(1).so.*))))
  # nvcc's own is left out: gcc drops a -I folder that is named again as a system's, and another CUDA's would come first.
  CUDA_INCLUDES := $(filter-out $(realpath $(dir $(realpath $(NVCC)))../include), \
    $(realpath $(sort $(call find_include,cublasLt.h,$(CUBLASLT_DIR)) $(call find_include,nvtx3/nvToolsExt.h) \
    $(call find_include,nccl.h,$(NCCL_HOME)))))
  CUBLASLT := $(call find_library,libcublasLt,$(CUBLASLT_DIR))
  ifeq ($(and $(call find_include,cublasLt.h,$(CUBLASLT_DIR)),$(CUBLASLT)),)
    $(error no cublasLt.h or no libcublasLt.so in $(CUBLASLT_DIR) $(CUDA_DIRS); CUBLASLT_DIR= names the folder that holds \
      include/ and lib/, make CUDA= builds for the cpu alone)
  endif
  # nvcc takes no name that ends in .so.13, which is all that a wheel has.
  LINK_CUDA := -Xlinker $(CUBLASLT),-rpath,$(dir $(CUBLASLT))
  # Without NCCL the ranks have the host's collectives alone.
  NCCL := $(if $(call find_include,nccl.h,$(NCCL_HOME)),$(call find_library,libnccl,$(NCCL_HOME)))
  ifneq ($(NCCL),)
    NCCL_FLAGS := -DHAVE_NCCL
    LINK_CUDA += -Xlinker $(NCCL),-rpath,$(dir $(NCCL))
  endif
  # The release has machine code for sm_80 (which sm_86 and sm_89 run) and sm_90a, and PTX that any newer GPU's driver can
  # compile, which it could not of a newer PTX. sm_90 alone would be without wgmma.
  GPU_ARCH ?= $(if $(RELEASE),release,$(if $(GPU),native,release))
  # A GPU that nvidia-smi can't name gets the release's too: nvcc's own native is not known to mean sm_90a.
  gencode = -gencode arch=compute_$(1),code=sm_$(1)
  GENCODE_RELEASE = $(call gencode,80) $(call gencode,90a) -gencode arch=compute_90,code=compute_90
  ifeq ($(GPU_ARCH),native)
    CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
    GENCODE := $(if $(CAPABILITY),$(call gencode,$(patsubst 90,90a,$(CAPABILITY))),$(GENCODE_RELEASE))
  else ifeq ($(GPU_ARCH),release)
    GENCODE := $(GENCODE_RELEASE)
  else
    GENCODE := $(call gencode,$(GPU_ARCH:sm_%=%))
  endif
  # Found folders come last, or a wheel's headers would stand before those of nvcc's own version. What the host compiler
  # and nvcc say of each other's pragmas (1675) is of no use, nor what gcc says of its own vector intrinsics.
  NVCC_COMPILE = $(NVCC) -x cu -std=c++17 -forward-unknown-opts -I. -D_GNU_SOURCE -DTARGET_CUDA -DPCRE2_CODE_UNIT_WIDTH=8 $(CFLAGS) -lineinfo \
    $(MPI_FLAGS) $(NCCL_FLAGS) $(DEPS:%=-isystem %/include) $(CUDA_INCLUDES:%=-Xcompiler=-idirafter,%) -Werror all-warnings \
    $(filter-out -Werror,$(WARNINGS)) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized -diag-suppress 1675 --threads 3
endif

.PHONY: all libraries cuda emu ptxas demo test test-programs check-headers fuzz bench clean
all: libraries $(B)/train_gpt
libraries:
	$(if $(MISSING),$(error $(MISSING) not found; scripts/setup.sh build installs what is missing))
cuda:
	+$(MAKE) --no-print-directory CUDA=yes all

# One copy of the engine per target and precision, and a main that picks one.
CPU_ENGINES := $(B)/engine_cpu_fp32.o $(B)/engine_cpu_bf16.o
ifneq ($(CUDA),)
$(B)/train_gpt: $(B)/main_cuda.o $(CPU_ENGINES) $(B)/engine_cuda_fp32.o $(B)/engine_cuda_bf16.o
	$(NVCC) -Xcompiler -fopenmp $^ $(LDFLAGS:-Wl,%=-Xlinker %) $(LDLIBS) $(LINK_CUDA) -o $@
else
$(B)/train_gpt: $(B)/main.o $(CPU_ENGINES)
	$(CC) $(CFLAGS) $^ $(LDFLAGS) $(LDLIBS) -o $@
endif
$(B)/main.o: train_gpt.c | $(B)
	$(COMPILE) -c $< -o $@
$(B)/main_cuda.o: train_gpt.c | $(B)
	$(COMPILE) -DHAVE_CUDA -c $< -o $@
$(B)/engine_cpu_%.o: train_gpt.c | $(B)
	$(COMPILE) -DENGINE=train_cpu_$* $(PRECISION_$*) -c $< -o $@
$(B)/engine_cuda_%.o: train_gpt.c | $(B)
	$(NVCC_COMPILE) $(GENCODE) -MMD -MP -DENGINE=train_cuda_$* $(PRECISION_$*) -c $< -o $@

# A line for each kernel, precision and architecture; fails where one spills more than the script allows.
ptxas:
	+$(MAKE) --no-print-directory CUDA=yes $(B)/ptxas.txt
PTXAS_LOGS := $(foreach a,sm_80 sm_90a,$(B)/ptxas_fp32_$a.log $(B)/ptxas_bf16_$a.log)
$(B)/ptxas.txt: scripts/ptxas_table.py $(PTXAS_LOGS)
	$^ >$@ || { mv $@ $@.failed; exit 1; }
ptxas = $(NVCC_COMPILE) -DENGINE=train_cuda_$(1) $(PRECISION_$(1)) -arch=$* -Xptxas -v -cubin $< -o $(@:log=cubin) 2>$@ || \
  { cat $@; rm $@; exit 1; }
$(B)/ptxas_fp32_%.log: train_gpt.c $(wildcard *.cuh kernels/*.cuh) | $(B)
	$(call ptxas,fp32)
$(B)/ptxas_bf16_%.log: train_gpt.c $(wildcard *.cuh kernels/*.cuh) | $(B)
	$(call ptxas,bf16)

# test/op_NAME.c is built per precision (NAME_fp32, NAME_bf16, NAME_amx); test/unit_NAME.c once.
$(B)/test/op_%_fp32: test/op_%.c | $(B)/test
	$(COMPILE) $(PRECISION_fp32) $< $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/op_%_bf16: test/op_%.c | $(B)/test
	$(COMPILE) $(PRECISION_bf16) $< $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/op_%_amx: test/op_%.c | $(B)/test
	$(COMPILE) $(PRECISION_amx) $< $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/unit_%: test/unit_%.c | $(B)/test
	$(COMPILE) $< $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
# A parser's fuzz target on its corpus alone.
$(B)/test/fuzz_%: test/fuzz/fuzz_%.c | $(B)/test
	$(COMPILE) -DFUZZ_CORPUS='"test/fuzz/corpus/$*"' $< $(LDFLAGS) $(RUNTIME_LDLIBS) -o $@

# The CUDA source on the host: its threads as fibers (which the sanitizers do not follow), test/emu/ in place of CUDA.
# -O2, since -O3 takes twice the time to compile. Op tests look at device memory from the host. As C++, g++ warns of its
# own vector intrinsics, which xxhash uses.
# Its NCCL is made of MPI.
EMULATE = $(CXX) -std=c++17 -Itest/emu $(CPPFLAGS) -DTARGET_CUDA -DCUDA_EMULATED $(if $(MPI_SHOW),-DHAVE_NCCL) $(CFLAGS) -O2 \
  $(WARNINGS) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized
EMULATE_TEST = $(EMULATE) -DDEVICE_MEMORY_MANAGED
$(B)/emu/op_%_fp32: test/op_%.c | $(B)/emu
	$(EMULATE_TEST) $(PRECISION_fp32) -x c++ $< $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/op_%_bf16: test/op_%.c | $(B)/emu
	$(EMULATE_TEST) $(PRECISION_bf16) -x c++ $< $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/engine_cuda_%.o: train_gpt.c | $(B)/emu
	$(EMULATE) -DENGINE=train_cuda_$* $(PRECISION_$*) -x c++ -c $< -o $@
$(B)/emu/train_gpt: $(B)/main_cuda.o $(CPU_ENGINES) $(B)/emu/engine_cuda_fp32.o $(B)/emu/engine_cuda_bf16.o
	$(CXX) $(CFLAGS) $^ $(LDFLAGS) $(LDLIBS) -o $@
$(B)/emu/unit_%: test/unit_%.c | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/unit_%: test/emu/unit_%.cu | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/unit_%: test/cuda/unit_%.cu | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@

$(B)/bench_%_fp32: test/bench_%.c | $(B)
	$(COMPILE) $(PRECISION_fp32) $< $(LDFLAGS) $(LDLIBS) -o $@
$(B)/bench_%_bf16: test/bench_%.c | $(B)
	$(COMPILE) $(PRECISION_bf16) $< $(LDFLAGS) $(LDLIBS) -o $@

OPS := $(patsubst test/%.c,%,$(wildcard test/op_*.c))
UNITS := $(patsubst test/%.c,%,$(wildcard test/unit_*.c))
# op_gpt's many steps on emulated tiles take too long under the sanitizers, which see the same code in op_golden.
AMX_OPS := op_matmul op_attention op_golden $(if $(SANITIZE),,op_gpt)
FUZZ := $(patsubst test/fuzz/fuzz_%.c,%,$(wildcard test/fuzz/fuzz_*.c))
TESTS := $(addprefix $(B)/test/,$(UNITS) $(FUZZ:%=fuzz_%) $(OPS:=_fp32) $(OPS:=_bf16) \
  $(addsuffix _amx,$(filter $(AMX_OPS),$(OPS))))
# On the emulator: all that has CUDA kernels. random and vector_math are the same code on both targets; op_zero
# holds the schedule to the plan, by the cpu target's work thread; op_gpt's fp32 would run for long and show what
# op_golden's shows; op_huggingface moves bytes, in either precision alike.
EMU_OPS := $(filter-out op_random op_vector_math op_zero,$(OPS))
EMU_TESTS := $(addprefix $(B)/emu/,unit_faults unit_model unit_faults_sm90 unit_model_sm90 unit_sm90 unit_collectives $(patsubst %,%_fp32,$(filter-out op_gpt,$(EMU_OPS))) $(addsuffix _bf16,$(filter-out op_huggingface,$(EMU_OPS))))
ifndef SANITIZE
  TESTS += $(EMU_TESTS)
  EMU_PROGRAM := $(B)/emu/train_gpt
endif

test:
	scripts/setup.sh test
	+$(MAKE) -j$(JOBS) --no-print-directory test-programs
	+$(MAKE) --no-print-directory check-headers
	TRAIN_GPT=$(B)/train_gpt TRAIN_GPT_CUDA=$(EMU_PROGRAM) test/run.sh $(TESTS) $(wildcard test/test_*.py)
test-programs: $(B)/train_gpt $(TESTS) $(EMU_PROGRAM)
emu: $(B)/emu/train_gpt $(EMU_TESTS)
# Each header compiles alone, as C and as C++, in both precisions.
HEADERS := $(filter-out kernels/ptx.cuh kernels/ptx_sm90.cuh kernels/attention_sm80.cuh kernels/attention_sm90%.cuh kernels/matmul_cublaslt.cuh,$(wildcard *.cuh *.h kernels/*.cuh runtime/*.h))
check-headers:
	@for h in $(HEADERS); do for p in -UPRECISION_BF16 -DPRECISION_BF16; do \
	  for l in "$(CC) -x c -std=gnu11" "$(CXX) -x c++ -std=c++17"; do \
	    echo "$$l -I. $(DEFINES) -D_GNU_SOURCE -march=$(ARCH) -fopenmp $(WARNINGS) $$p -fsyntax-only -include $$h /dev/null"; \
	  done; done; done | xargs -P $(JOBS) -I COMMAND sh -c 'COMMAND || { echo "failed: COMMAND"; exit 1; }'

# Each parser on input that libFuzzer grows from its corpus; fuzz-NAME is one of them. An input that does harm is left in
# $(B)/fuzz, as are those that reached new code.
CLANG ?= clang
FUZZ_SECONDS ?= 60
fuzz:
	scripts/setup.sh fuzz
	+$(MAKE) -j$(JOBS) --no-print-directory $(FUZZ:%=fuzz-%)
.SECONDARY: $(FUZZ:%=$(B)/fuzz/%) # or make removes them as steps on the way
fuzz-%: $(B)/fuzz/%
	@mkdir -p $(B)/fuzz/reached_$*
	@$< -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
	  -artifact_prefix=$(B)/fuzz/$*- $(B)/fuzz/reached_$* test/fuzz/corpus/$* >$(B)/fuzz/$*.log 2>&1 || \
	  { tail -n 60 $(B)/fuzz/$*.log; echo "fuzz: $*: failed"; exit 1; }
	@sed -n 's/^stat::number_of_executed_units: */fuzz: $*: no harm in runs: /p' $(B)/fuzz/$*.log
$(B)/fuzz/%: test/fuzz/fuzz_%.c | $(B)/fuzz
	$(CLANG) -std=gnu11 $(CPPFLAGS) -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(WARNINGS) $< \
	  $(LDFLAGS) $(RUNTIME_LDLIBS) -o $@

# Real text that every build machine has, unless TEXT names other: a file or a folder.
TEXT ?= /usr/include
demo:
	scripts/setup.sh demo
	+$(MAKE) -j$(JOBS) --no-print-directory all
	scripts/demo.sh $(TEXT)

bench:
	scripts/setup.sh build
	+$(MAKE) -j$(JOBS) --no-print-directory $(foreach b,matmul attention ops step,$(B)/bench_$(b)_fp32 $(B)/bench_$(b)_bf16) $(B)/train_gpt
	scripts/bench.sh $(B)

$(B) $(B)/test $(B)/emu $(B)/fuzz:
	mkdir -p $@
clean:
	rm -rf build

-include $(wildcard $(B)/*.d $(B)/test/*.d $(B)/emu/*.d $(B)/fuzz/*.d)
