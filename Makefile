# make            build/train_gpt for the cpu, and for the GPU too where nvcc and one are; CUDA= leaves that out
# make cuda       for both, whatever is here; RELEASE=1: for every GPU from sm_80 on, not only the one here
# make demo       train on real text, two minutes           make bench   speed and memory
# make test       every test                                make SANITIZE=1 test   with ASan and UBSan
# make quick      the units and the cpu target's ops: under two minutes once they are built
# make test-environments   those of them that locales, umasks, signals, users can disturb, under each
# make fuzz       each parser on hostile input by libFuzzer, FUZZ_SECONDS each
# make format     lays the source out by .clang-format              make compile_commands.json   each file's flags, for editors
# make emu        build/emu/train_gpt, the CUDA source on the host     make ptxas   each kernel's registers and spills
SHORT_FLAGS := $(firstword -$(MAKEFLAGS))
MAKEFLAGS += --no-builtin-rules # which would try to link a dependency file
ifeq ($(origin CC),default) # make's own cc
  CC := gcc
endif
# For this machine, unless the compiler is another's: then for all of that kind, and without the MPI that is here.
MACHINE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))
NATIVE := $(filter $(shell uname -m),$(MACHINE))
ARCH ?= $(if $(NATIVE),native)
JOBS ?= $(shell nproc)
B := build$(if $(SANITIZE),/sanitize)

comma := ,
# $(call write_changed,FILE,TEXT): as the Makefile is read, and only where the file holds something else. `make -n` and
# `make -q` write nothing: there the file counts as out of date.
write_changed = $(if $(call is_same,$(strip $(2)),$(strip $(file <$(1)))),,$(if $(findstring n,$(SHORT_FLAGS))$(findstring q,$(SHORT_FLAGS)), \
  $(eval .PHONY: $(1)),$(shell mkdir -p $(dir $(1)))$(file >$(1),$(2))))
is_same = $(and $(findstring $(1),$(2)),$(findstring $(2),$(1)))
MULTIARCH := $(or $(shell $(CC) -print-multiarch 2>/dev/null),$(MACHINE)-linux-gnu)

# What scripts/setup.sh --into .deps unpacked comes before what the system has. Its libraries need each other, and an
# RPATH, unlike a RUNPATH, counts for them too. Relative to the program (one to four folders below this one),
# since the path of this folder may have a space in it.
DEPS ?= $(wildcard .deps/usr)
ifneq ($(DEPS),)
  DEPS_LIB := $(DEPS)/lib/$(MULTIARCH)
  DEFINES += -isystem $(DEPS)/include -isystem $(DEPS)/include/$(MULTIARCH)
  LDFLAGS += -L$(DEPS_LIB) -Wl,-rpath-link,$(DEPS_LIB) -Wl,--disable-new-dtags $(foreach up,.. ../.. ../../.. ../../../..,$(foreach d,$(DEPS_LIB) $(DEPS_LIB)/openblas-openmp,-Wl,-rpath,$(if $(filter /%,$d),$d,'$$ORIGIN/$(up)/$d')))
endif

has = $(shell printf '\043include <$(1)>\n' | $(CC) $(DEFINES) -E -x c - >/dev/null 2>&1 && echo yes)
# Needed: JSON, checksums of checkpoints, the patterns by which tokenizers split text.
DEFINES += -DPCRE2_CODE_UNIT_WIDTH=8
RUNTIME_LDLIBS := -ljansson -lpcre2-8 -lm
LDLIBS += $(RUNTIME_LDLIBS)
MISSING := $(strip $(foreach h,jansson.h xxhash.h pcre2.h,$(if $(call has,$h),,$h)))
# Used where its header is found, or left out by ONEDNN= and OPENBLAS=; without any of them the plain OpenMP loops remain.
ONEDNN ?= $(call has,oneapi/dnnl/dnnl.h)
ifneq ($(ONEDNN),)
  DEFINES += -DHAVE_ONEDNN
  LDLIBS += -ldnnl
endif
# Debian keeps each BLAS in its own folder, so that /usr/include/cblas.h may be any of them.
OPENBLAS ?= yes
OPENBLAS_INCLUDE ?= $(if $(OPENBLAS),$(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/include/$(MULTIARCH)/openblas-openmp $r/include/openblas))))
ifneq ($(OPENBLAS_INCLUDE),)
  DEFINES += -DHAVE_OPENBLAS -I$(OPENBLAS_INCLUDE)
  LDLIBS += $(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/lib/$(MULTIARCH)/openblas-openmp/libopenblas.so)) -lopenblas)
endif

# MPI, by what its compiler mpicc adds; MPI= leaves it out or names another mpicc. What calls none of it loads none.
MPI ?= $(if $(NATIVE),mpicc)
MPI_SHOW := $(if $(MPI),$(shell $(MPI) -show 2>/dev/null))
ifneq ($(MPI_SHOW),)
  MPI_FLAGS := -DHAVE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_SHOW)))
  DEFINES += $(MPI_FLAGS)
  LDFLAGS += $(filter-out %-new-dtags,$(filter -L% -Wl%,$(MPI_SHOW))) -Wl,--as-needed
  RUNTIME_LDLIBS += $(filter -l%,$(MPI_SHOW))
endif

# No -ffast-math: NaN must stay NaN. Reductions that may be reordered say so by `omp simd`.
CFLAGS ?= -O3 -g
CFLAGS += -fopenmp -fno-math-errno -fno-trapping-math
# clang knows native as a CPU alone where that is not x86; vectors of 512 bits, where the machine has them, are x86's.
ARCH_FLAGS := $(if $(filter native,$(ARCH)),$(if $(filter x86_64,$(MACHINE)),-march=native,-mcpu=native),$(ARCH:%=-march=%)) \
  $(if $(filter x86_64,$(MACHINE)),-mprefer-vector-width=512)
# What tests the runtime, the parsers and the emulated CUDA source needs no machine's own instructions, and is built for
# those that each has, so that a test that passes on one machine is the same program on the next.
BASELINE_x86_64 := -march=x86-64 -mcx16 -msahf -mpopcnt -msse4.2 # x86-64-v2, which gcc has by that name since 11
BASELINE_aarch64 := -march=armv8-a
BASELINE := $(BASELINE_$(MACHINE))
# Warnings are errors by WERROR=1, which the tests set: a user's compiler may be newer than any that this was tried with.
# clang's pass-failed is of maxima of floats, which it leaves scalar; gcc's maybe-uninitialized, where vectors are of four
# lanes, of sums that a loop of at least one turn fills.
CLANG_IS_CC := $(findstring clang,$(shell $(CC) --version 2>&1))
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror) -Wno-unused-parameter -Wno-unused-function -Wno-missing-field-initializers \
  $(if $(CLANG_IS_CC),-Wno-pass-failed,$(if $(filter aarch64,$(MACHINE)),-Wno-maybe-uninitialized))
CPPFLAGS += -I. $(DEFINES) -D_GNU_SOURCE -MMD -MP
ifdef SANITIZE
  CFLAGS += -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
COMPILE_FOR = $(CC) -std=gnu11 $(CPPFLAGS) $(CFLAGS) $(1) $(WARNINGS)
COMPILE = $(call COMPILE_FOR,$(ARCH_FLAGS))
COMPILE_BASELINE = $(call COMPILE_FOR,$(BASELINE))
PRECISION_fp32 :=
PRECISION_bf16 := -DPRECISION_BF16
# bf16 with the AMX tiles emulated, so that kernels written on them run everywhere
PRECISION_amx := -DPRECISION_BF16 -DAMX_EMULATE

# ---- CUDA: looked for where it is wanted ----
NVCC := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME:=/bin/nvcc)) $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc)))
GPU := $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L >/dev/null 2>&1 && echo yes))
NEEDS_COMPILER := $(filter-out clean format format-check,$(or $(MAKECMDGOALS),all))
CUDA ?= $(if $(SANITIZE),,$(and $(NEEDS_COMPILER),$(NVCC),$(GPU),yes))
ifneq ($(CUDA),)
  ifeq ($(shell command -v $(NVCC) 2>/dev/null),)
    $(error no nvcc in CUDA_HOME$(comma) PATH or /usr/local/cuda$(NVCC:%=, nor is % one); make CUDA= builds for the cpu alone)
  endif
  # A toolkit's folders, the system's, or those of the nvidia wheels that PyTorch comes with; CUBLASLT_DIR= names another,
  # NCCL_HOME= one for NCCL.
  WHEELS := $(shell $(or $(PYTHON),python3) -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null)
  CUDA_DIRS := $(CUDA_HOME) $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))) /usr/local/cuda /usr $(foreach w,$(WHEELS),$w/cu13 $w/cublas $w/nvtx $w/nccl)
  find_include = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(patsubst %/$(1),%,$(wildcard $d/include/$(1)))))
  find_library = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(foreach l,lib64 lib lib/$(MULTIARCH) targets/$(MACHINE:aarch64=sbsa)-linux/lib, \
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
  ifeq ($(call find_include,nvtx3/nvToolsExt.h),)
    $(error no nvtx3/nvToolsExt.h in $(CUDA_DIRS); install CUDA's NVTX$(comma) or make CUDA= builds for the cpu alone)
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
  NVCC_COMPILE = $(NVCC) -x cu -std=c++17 -forward-unknown-opts -I. -D_GNU_SOURCE -DTARGET_CUDA -DPCRE2_CODE_UNIT_WIDTH=8 $(CFLAGS) $(ARCH_FLAGS) -lineinfo \
    $(MPI_FLAGS) $(NCCL_FLAGS) $(DEPS:%=-isystem %/include) $(CUDA_INCLUDES:%=-Xcompiler=-idirafter,%) $(if $(WERROR),-Werror all-warnings) \
    $(filter-out -Werror,$(WARNINGS)) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized -diag-suppress 1675 --threads 3
endif

.PHONY: all cuda emu ptxas demo test test-programs test-environments quick quick-programs check-headers fuzz bench clean compile_commands.json format format-check
all: $(B)/train_gpt
cuda:
	+$(MAKE) --no-print-directory CUDA=yes all

# One copy of the engine per target and precision, and a main that picks one. What looks whether this CPU has the
# instructions that they were compiled for, the table of which is compiled as they are, is itself compiled for any.
$(B)/cpu_features.o: runtime/machine/cpu_features.c $(B)/build-with | $(B)
	$(call COMPILE_FOR,) -c $< -o $@
$(B)/cpu_features_needed.o: runtime/machine/cpu_features_needed.c $(B)/build-with | $(B)
	$(COMPILE) -c $< -o $@
# The commit, for --version: a file of its own, written where it changes, so that a commit compiles no engine anew. A tree
# that lies in another's repository has none; one that scripts/gpu_pack.sh packed brings it along.
COMMIT := $(or $(if $(wildcard .git),$(shell git describe --always --dirty --abbrev=12 2>/dev/null)),$(file <.packed_commit),unknown)
$(call write_changed,$(B)/commit.c,const char build_commit[] = "$(COMMIT)";)
$(B)/commit.c: ;
$(B)/commit.o: $(B)/commit.c $(B)/build-with
	$(call COMPILE_FOR,) -c $< -o $@
# What depends on neither target nor precision, compiled once, for any machine of this kind. Tests of what a file does not
# export include its .c, whose object the linker then leaves in the archive.
LIBRARY := $(B)/library.a
LIBRARY_SOURCES := $(filter-out runtime/machine/cpu_features%.c,$(wildcard runtime/*.c runtime/*/*.c formats/*.c))
$(LIBRARY): $(LIBRARY_SOURCES:%.c=$(B)/library/%.o)
	rm -f $@
	$(AR) rcs $@ $^
# fail() is called by what is compiled for any CPU; sums over buffers of a model's size are compiled as the engines are.
$(B)/library/runtime/machine/error.o: BASELINE :=
$(B)/library/runtime/net/host_collectives.o: BASELINE := $(ARCH_FLAGS)
# So are checksums of checkpoints: XXH3 is twice as fast by vectors of 512 bits as by SSE2, with the same result.
$(B)/library/runtime/files/hash.o: BASELINE := $(ARCH_FLAGS)
$(B)/library/%.o: %.c $(B)/build-with
	@mkdir -p $(@D)
	$(COMPILE_BASELINE) -c $< -o $@
PROGRAM := $(B)/cpu_features.o $(B)/cpu_features_needed.o $(B)/commit.o $(LIBRARY)
CPU_ENGINES := $(B)/engine_cpu_fp32.o $(B)/engine_cpu_bf16.o
# What it was linked for last: the objects of the other are up to date then too.
LINKED := $(if $(CUDA),cuda,cpu)
ifneq ($(strip $(file <$(B)/linked-for)),$(LINKED))
.PHONY: $(B)/train_gpt
endif
ifneq ($(CUDA),)
$(B)/train_gpt: $(B)/main_cuda.o $(CPU_ENGINES) $(B)/engine_cuda_fp32.o $(B)/engine_cuda_bf16.o $(PROGRAM)
	$(NVCC) -Xcompiler -fopenmp $^ $(LDFLAGS:-Wl,%=-Xlinker %) $(LDLIBS) $(LINK_CUDA) -o $@
	@echo $(LINKED) >$(B)/linked-for
else
$(B)/train_gpt: $(B)/main.o $(CPU_ENGINES) $(PROGRAM)
	$(CC) $(CFLAGS) $^ $(LDFLAGS) $(LDLIBS) -o $@
	@echo $(LINKED) >$(B)/linked-for
endif
$(B)/main.o: train_gpt.c $(B)/build-with | $(B)
	$(COMPILE) -c $< -o $@
GPU_CODE := $(sort $(patsubst code=%,%,$(filter code=%,$(subst $(comma), ,$(GENCODE)))))
$(B)/main_cuda.o: train_gpt.c $(B)/build-with $(B)/build-with-cuda | $(B)
	$(COMPILE) -DHAVE_CUDA -DGPU_ARCHITECTURES='"$(GPU_CODE)"' -c $< -o $@
$(B)/engine_cpu_%.o: train_gpt.c $(B)/build-with | $(B)
	$(COMPILE) -DENGINE=train_cpu_$* $(PRECISION_$*) -c $< -o $@
$(B)/engine_cuda_%.o: train_gpt.c $(B)/build-with $(B)/build-with-cuda | $(B)
	$(NVCC_COMPILE) $(GENCODE) -MMD -MP -DENGINE=train_cuda_$* $(PRECISION_$*) -c $< -o $@

# A line for each kernel, precision and architecture; fails where one spills more than the script allows.
ptxas:
	+$(MAKE) --no-print-directory CUDA=yes $(B)/ptxas.txt
PTXAS_LOGS := $(foreach a,sm_80 sm_90a,$(B)/ptxas_fp32_$a.log $(B)/ptxas_bf16_$a.log)
$(B)/ptxas.txt: scripts/ptxas_table.py $(PTXAS_LOGS)
	$^ >$@ || { mv $@ $@.failed; exit 1; }
ptxas = $(NVCC_COMPILE) -DENGINE=train_cuda_$(1) $(PRECISION_$(1)) -arch=$* -Xptxas -v -cubin $< -o $(@:log=cubin) 2>$@ || \
  { cat $@; rm $@; exit 1; }
$(B)/ptxas_fp32_%.log: train_gpt.c $(wildcard *.cuh */*.cuh) $(B)/build-with $(B)/build-with-cuda | $(B)
	$(call ptxas,fp32)
$(B)/ptxas_bf16_%.log: train_gpt.c $(wildcard *.cuh */*.cuh) $(B)/build-with $(B)/build-with-cuda | $(B)
	$(call ptxas,bf16)

# test/op_NAME.c is built per precision (NAME_fp32, NAME_bf16, NAME_amx); test/unit_NAME.c once.
$(B)/test/op_%_fp32: test/op_%.c $(B)/build-with $(LIBRARY) | $(B)/test
	$(COMPILE) $(PRECISION_fp32) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/op_%_bf16: test/op_%.c $(B)/build-with $(LIBRARY) | $(B)/test
	$(COMPILE) $(PRECISION_bf16) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/op_%_amx: test/op_%.c $(B)/build-with $(LIBRARY) | $(B)/test
	$(COMPILE) $(PRECISION_amx) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
$(B)/test/unit_%: test/unit_%.c $(B)/build-with $(LIBRARY) | $(B)/test
	$(COMPILE_BASELINE) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -lcmocka -o $@
# A parser's fuzz target on its corpus alone.
$(B)/test/fuzz_%: test/fuzz/fuzz_%.c $(B)/build-with $(LIBRARY) | $(B)/test
	$(COMPILE_BASELINE) -DFUZZ_CORPUS='"test/fuzz/corpus/$*"' $< $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -o $@

# The CUDA source on the host: its threads as fibers (which the sanitizers do not follow), test/emu/ in place of CUDA.
# -O2, since -O3 takes twice the time to compile. Op tests look at device memory from the host. As C++, g++ warns of its
# own vector intrinsics, which xxhash uses.
# Its NCCL is made of MPI.
EMULATE = $(CXX) -std=c++17 -Itest/emu $(CPPFLAGS) -DTARGET_CUDA -DCUDA_EMULATED $(if $(MPI_SHOW),-DHAVE_NCCL) $(CFLAGS) $(BASELINE) -O2 \
  $(WARNINGS) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized
EMULATE_TEST = $(EMULATE) -DDEVICE_MEMORY_MANAGED
$(B)/emu/op_%_fp32: test/op_%.c $(B)/build-with $(LIBRARY) | $(B)/emu
	$(EMULATE_TEST) $(PRECISION_fp32) -x c++ $< -x none $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/op_%_bf16: test/op_%.c $(B)/build-with $(LIBRARY) | $(B)/emu
	$(EMULATE_TEST) $(PRECISION_bf16) -x c++ $< -x none $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/engine_cuda_%.o: train_gpt.c $(B)/build-with | $(B)/emu
	$(EMULATE) -DENGINE=train_cuda_$* $(PRECISION_$*) -x c++ -c $< -o $@
$(B)/emu/main.o: train_gpt.c $(B)/build-with | $(B)/emu
	$(COMPILE) -DHAVE_CUDA -DGPU_ARCHITECTURES='"the emulator"' -c $< -o $@
$(B)/emu/train_gpt: $(B)/emu/main.o $(CPU_ENGINES) $(B)/emu/engine_cuda_fp32.o $(B)/emu/engine_cuda_bf16.o $(PROGRAM)
	$(CXX) $(CFLAGS) $^ $(LDFLAGS) $(LDLIBS) -o $@
$(B)/emu/unit_%: test/unit_%.c $(B)/build-with $(LIBRARY) | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< -x none $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/unit_%: test/emu/unit_%.cu $(B)/build-with $(LIBRARY) | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< -x none $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@
$(B)/emu/unit_%: test/cuda/unit_%.cu $(B)/build-with $(LIBRARY) | $(B)/emu
	$(EMULATE) $(PRECISION_bf16) -x c++ $< -x none $(LIBRARY) $(LDFLAGS) $(RUNTIME_LDLIBS) -lcmocka -o $@

$(B)/bench_%_fp32: test/bench_%.c $(B)/build-with $(LIBRARY) | $(B)
	$(COMPILE) $(PRECISION_fp32) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -o $@
$(B)/bench_%_bf16: test/bench_%.c $(B)/build-with $(LIBRARY) | $(B)
	$(COMPILE) $(PRECISION_bf16) $< $(LIBRARY) $(LDFLAGS) $(LDLIBS) -o $@

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
# Without emulated tiles and, below, the emulated GPU; the tests in Python run whole trainings.
QUICK_TESTS := $(filter-out %_amx,$(TESTS))
ifndef SANITIZE
  TESTS += $(EMU_TESTS)
  EMU_PROGRAM := $(B)/emu/train_gpt
endif

test:
	scripts/setup.sh test
	+$(MAKE) -j$(JOBS) --no-print-directory WERROR=1 test-programs
	+$(MAKE) --no-print-directory WERROR=1 check-headers
	TRAIN_GPT=$(B)/train_gpt TRAIN_GPT_CUDA=$(EMU_PROGRAM) test/run.sh $(TESTS) $(wildcard test/test_*.py)
test-programs: $(B)/train_gpt $(TESTS) $(EMU_PROGRAM)
quick: $(QUICK_TESTS)
	test/run.sh $^
quick-programs: $(QUICK_TESTS)
# Those that a user's environment can disturb, in each environment of the script's.
test-environments: $(B)/train_gpt $(UNITS:%=$(B)/test/%)
	BUILD=$(B) test/environments.sh
emu: $(B)/emu/train_gpt $(EMU_TESTS)
# Each header compiles alone, as C and as C++, in both precisions.
HEADERS := $(filter-out kernels/ptx.cuh kernels/ptx_sm90.cuh kernels/attention_sm80.cuh kernels/attention_sm90%.cuh kernels/matmul_cublaslt.cuh,$(wildcard *.cuh *.h */*.cuh run/*.h formats/*.h runtime/*.h runtime/*/*.h))
check-headers:
	@for h in $(HEADERS); do for p in -UPRECISION_BF16 -DPRECISION_BF16; do \
	  for l in "$(CC) -x c -std=gnu11" "$(CXX) -x c++ -std=c++17"; do \
	    echo "$$l -I. $(DEFINES) -D_GNU_SOURCE $(ARCH_FLAGS) -fopenmp $(WARNINGS) $$p -fsyntax-only -include $$h /dev/null"; \
	  done; done; done | xargs -P $(JOBS) -I COMMAND sh -c 'COMMAND || { echo "failed: COMMAND"; exit 1; }'

# Each parser on input that libFuzzer grows from its corpus; fuzz-NAME is one of them. An input that does harm is left in
# $(B)/fuzz, as are those that reached new code.
CLANG ?= clang
FUZZ_SECONDS ?= 60
fuzz:
	scripts/setup.sh fuzz
	+$(MAKE) -j$(JOBS) --no-print-directory $(FUZZ:%=fuzz-%)
# Or make removes them as steps on the way; without names it would keep all, and build none that is missing.
ifneq ($(FUZZ),)
.SECONDARY: $(FUZZ:%=$(B)/fuzz/%)
endif
fuzz-%: $(B)/fuzz/%
	@mkdir -p $(B)/fuzz/reached_$*
	@$< -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
	  -artifact_prefix=$(B)/fuzz/$*- $(B)/fuzz/reached_$* test/fuzz/corpus/$* >$(B)/fuzz/$*.log 2>&1 || \
	  { tail -n 60 $(B)/fuzz/$*.log; echo "fuzz: $*: failed"; exit 1; }
	@sed -n 's/^stat::number_of_executed_units: */fuzz: $*: no harm in runs: /p' $(B)/fuzz/$*.log
$(B)/fuzz/%: test/fuzz/fuzz_%.c $(B)/build-with | $(B)/fuzz
	$(CLANG) -std=gnu11 $(CPPFLAGS) -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $(WARNINGS) $< \
	  $(LIBRARY_SOURCES) $(LDFLAGS) $(RUNTIME_LDLIBS) -o $@

# For editors: each file's flags; and the layout by .clang-format, but for tables that a script writes.
CLANG_FORMAT ?= clang-format
FORMATTED = $(filter-out formats/unicode_tables.c,$(shell git ls-files '*.c' '*.h' '*.cuh' '*.cu'))
compile_commands.json:
	$(MAKE) -nB --no-print-directory CUDA= all test-programs | scripts/compile_commands.py $(HEADERS) >$@
format:
	@$(CLANG_FORMAT) -i $(FORMATTED)
format-check:
	@$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)

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

# ---- What a build is made with: the compilers, this machine where ARCH=native, the libraries that were found, the flags ----
# Each object depends on the file that holds it, so that MPI installed later, another ARCH or a tree that was copied to
# another machine build anew what they change. -Werror changes no object, and is not among them.
define BUILD_WITH
$(shell $(CC) --version 2>&1 | head -n 1; $(CC) $(ARCH_FLAGS) -E -v -x c /dev/null 2>&1 >/dev/null | grep -e ' -march=' -e ' -target-cpu ')
$(filter-out -Werror,$(COMPILE)) $(LDFLAGS) $(LDLIBS)
$(shell $(CXX) --version 2>&1 | head -n 1)
$(filter-out -Werror,$(EMULATE))
endef
$(call write_changed,$(B)/build-with.found,$(BUILD_WITH))
ifneq ($(CUDA),)
define BUILD_WITH_CUDA
$(shell $(NVCC) --version 2>&1 | tail -n 1)
$(filter-out -Werror all-warnings,$(NVCC_COMPILE)) $(GENCODE) $(LINK_CUDA)
endef
$(call write_changed,$(B)/build-with-cuda,$(BUILD_WITH_CUDA))
endif
$(B)/build-with-cuda: ;
$(B)/build-with.found: ;
# Before anything is compiled: whether what was found can be used. A message of one line names the way out.
build_can = $(CC) $(1) -x c $(2) -o $@.program $(3) >/dev/null 2>$@.log
build_fails = { echo "make: $(1)" >&2; exit 2; }
$(B)/build-with: $(B)/build-with.found
	@echo 'int main(void) { return 0; }' >$@.c
	@$(call build_can,,$@.c) || $(call build_fails,$(CC) can't build a program ($$(tail -n 1 $@.log)); CC= names a compiler that can)
	@$(call build_can,$(ARCH_FLAGS),$@.c) || $(call build_fails,$(CC) does not know ARCH=$(ARCH); ARCH=native is this machine)
	@echo '#include <omp.h>' >>$@.c
	@$(call build_can,-fopenmp,$@.c) || $(call build_fails,$(CC) has no OpenMP; install it (clang: libomp-dev) or take gcc by CC=gcc)
	$(if $(MISSING),@$(call build_fails,$(MISSING) not found; scripts/setup.sh build installs what is missing))
ifneq ($(MPI_SHOW),)
	@printf '#include <mpi.h>\nint main(void) { return MPI_Finalize(); }\n' >$@.c
	@$(call build_can,$(MPI_FLAGS),$@.c,$(LDFLAGS) $(filter -l%,$(MPI_SHOW))) || $(call build_fails,$(MPI) names an MPI that \
	  no program links with; install it (Debian: libopenmpi-dev) or leave it out by MPI=)
endif
	@rm -f $@.c $@.program $@.log
	@touch $@

$(B) $(B)/test $(B)/emu $(B)/fuzz:
	mkdir -p $@
clean:
	rm -rf build

-include $(wildcard $(B)/*.d $(B)/library/*/*.d $(B)/library/*/*/*.d $(B)/test/*.d $(B)/emu/*.d $(B)/fuzz/*.d)
