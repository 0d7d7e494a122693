# make            builds build/train_gpt: the cpu target and, where nvcc and a GPU are found, CUDA; CUDA= leaves it out
# make cuda       builds both targets, with or without a GPU; RELEASE=1: for every GPU from sm_80 on, not only this one
# make demo       trains on real text, two minutes          make bench   measures speed and memory
# make test       runs the tests' short run                 make SANITIZE=1 test   runs it under ASan and UBSan
# make test-all   runs the tests of make test with every shape, seed, kill and whole training
# make quick      runs most units and the cpu target's ops, in bf16 and fp32: under a minute once they are built
# make test-levels   trains with each instruction set (x86-64-v3, ...) that a program for any CPU has and this CPU runs
# make test-environments   runs the tests that locales, umasks, signals and users can disturb, under each of these
# make test-long  runs the long table: sanitizers, compilers, qemu, kills, ...; ROW=name: one row (test/long_rows.tsv)
# make fuzz       runs each parser on hostile input by libFuzzer, for FUZZ_SECONDS (60)
# make install    installs program, scripts, manual page and completions below PREFIX=/usr/local; make uninstall removes them
# make deb        builds for any CPU of this kind, and makes a package of Debian of it
# make format     lays the source out by .clang-format      make compile_commands.json   writes flags, for editors
# make help       prints these lines
# make emu        builds build/emu/train_gpt, CUDA on the host      make ptxas   lists kernels' registers and spills
SHORT_FLAGS := $(firstword -$(MAKEFLAGS))
MAKEFLAGS += --no-builtin-rules # make would try to link each .d file that it includes
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
# The C++ compiler that comes with CC: a program with objects of both compilers must have one OpenMP library.
CXX := $(if $(filter default,$(origin CXX)),$(or $(filter %g++ %clang++ g++-% clang++-%,$(subst clang,clang++,$(subst gcc,g++,$(CC)))),g++),$(CXX))
JOBS ?= $(shell nproc)
B := build$(if $(SANITIZE),/sanitize)
comma := ,
# `make install` installs what was built last and builds only where nothing was: under sudo, say, other variables are
# set and nvcc is not found. With INSTALLS_BUILD not even what a build is made with is written down anew.
REFERENCE := $(addprefix $(B)/reference/,train_gpt.1 train_gpt.bash train_gpt.zsh options.md)
INSTALLS_BUILD := $(and $(MAKECMDGOALS),$(if $(filter-out install uninstall,$(MAKECMDGOALS)),,yes),$(wildcard $(B)/train_gpt),$(wildcard $(B)/reference/train_gpt.zsh))
include scripts/libraries.mk # sets ARCH, MACHINE, DEFINES, LDFLAGS, LDLIBS, RUNTIME_LDLIBS, MISSING

# ---- How each kind of file is compiled ----
# No -ffast-math: NaN must stay NaN. A reduction that may be reordered has `omp simd`. -g1 has the functions and lines
# that backtraces and profilers need; -g, by which a debugger shows variables, takes gcc half as long again.
CFLAGS ?= -O3 -g1
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all
IS_CLANG := $(findstring clang,$(shell $(CC) --version 2>/dev/null))
# gcc makes FMAs of multiplications and additions from -O2 on, and by -fexpensive-optimizations. Some tests hold an op
# to the bits of its formula, so that the sanitizers' build must make them too.
CFLAGS += -fopenmp -fno-math-errno -fno-trapping-math \
  $(if $(SANITIZE),-O1 $(if $(IS_CLANG),,-fexpensive-optimizations) $(SANITIZERS) -fno-omit-frame-pointer)
all: $(B)/train_gpt $(B)/tokenize_text $(if $(NATIVE),reference)
include scripts/levels.mk # sets ARCH_FLAGS, LEVELS and LEVEL_ROWS
# The tests of the runtime, the parsers and the emulated CUDA source are compiled for instructions that every machine
# has: a test that passed on one machine is the same program on the next.
BASELINE_x86_64 := -march=x86-64 -mcx16 -msahf -mpopcnt -msse4.2 # x86-64-v2, a name that gcc knows from 11 on
BASELINE_aarch64 := -march=armv8-a
BASELINE := $(BASELINE_$(MACHINE))
# WERROR=1, which the tests set, makes warnings errors; a user's compiler may be newer, and warn more, than any tried
# here. Left out: clang's pass-failed, of maxima of floats, which clang leaves scalar; its invalid-feature-combination,
# which clang 19's own -march=native raises on CPUs with AVX10.1; gcc's maybe-uninitialized on aarch64, where vectors
# have four lanes, of sums that a loop of at least one turn fills; gcc's psabi, a note that other compilers pass vectors
# by value in another way: no other object calls such a function.
WARNINGS := -Wall -Wextra $(if $(WERROR),-Werror) -Wno-psabi -Wno-unused-parameter -Wno-unused-function -Wno-missing-field-initializers \
  $(if $(IS_CLANG),-Wno-pass-failed -Wno-unknown-warning-option -Wno-invalid-feature-combination,$(if $(filter aarch64,$(MACHINE)),-Wno-maybe-uninitialized))
CPPFLAGS += -I. $(DEFINES) -D_GNU_SOURCE -MMD -MP
COMPILE_FOR = $(CC) -std=gnu11 $(CPPFLAGS) $(CFLAGS) $(1) $(WARNINGS)
COMPILE = $(call COMPILE_FOR,$(ARCH_FLAGS))
COMPILE_BASELINE = $(call COMPILE_FOR,$(BASELINE))
# Compiles the CUDA source for the host: threads are fibers (which the sanitizers do not follow), test/emu/ takes the
# place of CUDA, and NCCL is made of MPI. -O2, since -O3 compiles twice as long. -Wno-maybe-uninitialized and
# -Wno-uninitialized: compiling C++, gcc warns of its own vector intrinsics, which xxHash uses.
# NOT_UNIQUE: g++ would let all copies of the engine in a process share an inline variable; each copy needs its own.
NOT_UNIQUE := -fno-gnu-unique
EMULATE = $(CXX) -std=c++17 -Itest/emu $(CPPFLAGS) -DTARGET_CUDA -DCUDA_EMULATED $(if $(MPI_SHOW),-DHAVE_NCCL) $(CFLAGS) \
  $(BASELINE) $(if $(filter -O3,$(CFLAGS)),-O2) $(NOT_UNIQUE) $(WARNINGS) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized
# A test of an op reads device memory from the host.
EMULATE_TEST = $(EMULATE) -DDEVICE_MEMORY_MANAGED $(TEST_FLAGS)
# cuDNN's stand-ins lie beside the programs that load them at run time. An RPATH, unlike a RUNPATH, goes before
# LD_LIBRARY_PATH, so that a real cuDNN is never loaded in their place.
EMULATE_LINK := -Wl,--disable-new-dtags '-Wl,-rpath,$$ORIGIN'
PRECISION_bf16 := -DPRECISION_BF16
PRECISION_amx := -DPRECISION_BF16 -DAMX_EMULATE # AMX tiles emulated, so that kernels on tiles run everywhere
PRECISION_dot := -DPRECISION_BF16 -DBF16_DOT_EMULATE # dot products of bf16 pairs emulated; no AMX
include scripts/cuda.mk # sets CUDA, and where CUDA is not empty what nvcc compiles and links with

# A build prints a line a file, such as "CC kernels/norm.cu cpu bf16"; V=1 prints the commands instead.
Q := $(if $(V),,@)
quietly = $(if $(V),,@printf '%-4s %s\n' $(1) '$(2)';)
what_of = $(subst _, ,$(patsubst $(B)/%,%,$(firstword $(subst /, ,$(@:$(B)/ops/%=%))))) # ops/cpu_bf16/norm.o: cpu bf16

# $(call made,COMMAND[,LIBRARIES]): the recipe that makes the target of the first prerequisite by COMMAND.
# $(call program,TARGET,SOURCE,COMMAND,ARCHIVES,LIBRARIES): rules for a program. COMMAND compiles SOURCE to
# $(B)/TARGET.o, which is linked with ARCHIVES (of ops), $(LIBRARY) and LIBRARIES. TARGET and SOURCE may be patterns. An
# argument's $$ is a $ of the recipe.
# $(call linked,TARGET,COMMAND,ARCHIVES,LIBRARIES,OBJECT): the link's rule; OBJECT is $(B)/TARGET.o unless given.
define made
@mkdir -p $(@D)
$(call quietly,$(if $(filter %.o,$@),CC,LINK),$(if $(filter $(B)/ops/%,$@),$< $(what_of),$(if $(filter %.o,$@),$< )$(@:$(B)/%=%)))$(1) $< $(2) -o $@
endef
define linked
$(B)/$(1): $(or $(5),$(B)/$(1).o) $(3) $(if $(findstring library.a,$(3)),,$(LIBRARY))
	$$(call quietly,LINK,$$(@:$(B)/%=%))$(if $(findstring -x c++,$(2)),$$(CXX),$$(CC)) $$(CFLAGS) $(if $(findstring sanitized,$(3)),$(SANITIZERS)) $$^ $$(LDFLAGS) $(4) -o $$@
.PRECIOUS: $(B)/$(1).o # make would remove it as an intermediate file
endef
define program_rules
$(B)/$(1).o: $(2) $(B)/build-with
	$$(call made,$(3) -c)
$(call linked,$(1),$(3),$(4),$(5))
endef
program = $(eval $(call program_rules,$(1),$(2),$(3),$(4),$(5)))
# The library has what depends on neither target nor precision, compiled once. A test of what a file does not export
# includes the .c file; the linker then leaves the file's object in the archive.
LIBRARY := $(B)/library.a
LIBRARY_SOURCES := $(filter-out runtime/machine/cpu_features%.c,$(wildcard runtime/*.c runtime/*/*.c formats/*.c))
$(LIBRARY): $(LIBRARY_SOURCES:%.c=$(B)/library/%.o)
$(B)/%.a:
	$(call quietly,AR,$(@:$(B)/%=%))rm -f $@ && $(AR) rcs $@ $^
# The library is compiled for the baseline, or for ARCH=x86-64, which is less. error.o and say.o run before the CPU is
# checked, so they are compiled for any CPU. hash.o and host_collectives.o loop over a model's bytes, so they are
# compiled as the engines are.
LIBRARY_FLAGS := $(if $(filter-out x86-64,$(ARCH)),$(BASELINE),$(ARCH_FLAGS))
$(B)/library/%.o: %.c $(B)/build-with
	$(call made,$(call COMPILE_FOR,$(LIBRARY_FLAGS)) -c)
$(B)/library/runtime/machine/error.o $(B)/library/runtime/machine/say.o: LIBRARY_FLAGS :=
$(B)/library/runtime/files/hash.o $(B)/library/runtime/net/host_collectives.o: LIBRARY_FLAGS := $(ARCH_FLAGS)
# The worker of scripts/prepare_data.py.
$(call program,tokenize_text,scripts/tokenize_text.c,$$(COMPILE_BASELINE) $$(HOST_FLAGS),,$$(RUNTIME_LDLIBS))
# The library under ASan and UBSan, with which the tests of what strangers send (files, messages) are linked in every
# build.
SANITIZED_LIBRARY := $(B)/sanitized/library.a
SANITIZED_FLAGS := -O1 $(SANITIZERS) -fno-omit-frame-pointer
$(B)/sanitized/%.o: %.c $(B)/build-with
	$(call made,$(COMPILE_BASELINE) $(SANITIZED_FLAGS) -c)
$(SANITIZED_LIBRARY): $(LIBRARY_SOURCES:%.c=$(B)/sanitized/%.o)
include scripts/build_with.mk # makes $(B)/build-with, on which every object depends
# The commit, for --version, in a file of its own that is written only where the commit changes, so that no engine is
# compiled anew. A tree without .git, as one in another repository, has the commit that scripts/gpu_pack.sh packed, the
# one that `git archive` wrote into .archived_commit, or none. git would refuse a tree of another user, as to root.
ARCHIVED_COMMIT := $(filter-out $$Format:%,$(shell cut -c -12 .archived_commit 2>/dev/null))
COMMIT := $(or $(if $(wildcard .git),$(shell git -c safe.directory='*' describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)),$(file <.packed_commit),$(ARCHIVED_COMMIT),unknown)
$(call write_changed,$(B)/commit.c,const char build_commit[] = "$(COMMIT)";)
$(B)/commit.o: $(B)/commit.c $(B)/build-with
	$(call made,$(call COMPILE_FOR,) -c)
# The check that this CPU has the engines' instructions is compiled for any CPU. The table of these instructions is
# compiled as the engines are: it is made of the compiler's macros.
$(B)/cpu_features.o: runtime/machine/cpu_features.c $(B)/build-with
	$(call made,$(call COMPILE_FOR,) -c)
$(B)/cpu_features_needed.o: runtime/machine/cpu_features_needed.c $(B)/build-with
	$(call made,$(COMPILE) -c)

# ---- The ops: each .cu of kernels/ is an object for each copy of the engine; engines and tests link these objects ----
# A copy is named by a target, a precision and, above ARCH, a level of instruction sets: cpu_bf16_x86_64_v3.
OPS_SOURCES := $(wildcard kernels/*.cu kernels/*/*.cu)
ops_objects = $(addprefix $(B)/ops/$(1)/,$(OPS_SOURCES:kernels/%.cu=%.o))
# $(call ops,COPY,COMMAND,OPS): rules for a copy's objects and, for tests, their archive $(B)/ops/COPY.a, of OPS or,
# where OPS is empty, of all ops. A test that includes an op's .cu defines the symbols of the op's object, which the
# linker then leaves in the archive.
define ops_rules
$(B)/ops/$(1)/%.o: kernels/%.cu $(B)/build-with
	$$(call made,$(2) -c)
$(B)/ops/$(1).a: $(or $(3:%=$(B)/ops/$(1)/%.o),$(call ops_objects,$(1)))
endef
ops = $(eval $(call ops_rules,$(1),$(2),$(3)))
$(foreach p,fp32 bf16,$(call ops,cpu_$p,$$(COMPILE) $$(PRECISION_$p) -x c))
# The emulator's fp32 ops are compiled by -O1: only the long run trains with them.
EMU_OPS_bf16 = $(EMULATE) $(PRECISION_bf16)
EMU_OPS_fp32 = $(EMULATE) $(TEST_FLAGS) $(PRECISION_fp32)
$(foreach p,fp32 bf16,$(call ops,emu_$p,$$(EMU_OPS_$p) -x c++))
# The emulator itself, which is of no precision: each engine and each test's program links it.
EMULATOR := $(B)/emu/emulator.o
$(EMULATOR): test/emu/emulator.cpp $(B)/build-with
	$(call made,$(EMULATE) -c)
$(B)/ops/emu_fp32.a $(B)/ops/emu_bf16.a: $(EMULATOR)
# $(call made_by_nvcc,COMMAND): the recipe of an op by nvcc. It prints the seconds taken, and leaves what ptxas says of
# registers and spills beside the object.
define made_by_nvcc
@mkdir -p $(@D)
$(Q)begin=$$(date +%s); $(1) -Xptxas -v -c $< -o $@ 2>$(@:.o=.ptxas) || { cat $(@:.o=.ptxas) >&2; exit 1; }; \
  grep -v '^ptxas info\|^    [0-9]* bytes stack frame\|^$$' $(@:.o=.ptxas) >&2; echo "NVCC $< $(what_of) $$(($$(date +%s) - begin)) s"
endef
$(B)/ops/cuda_fp32/%.o: kernels/%.cu $(B)/build-with $(B)/build-with-cuda
	$(call made_by_nvcc,$(NVCC_COMPILE) $(GENCODE) -MMD -MP)
$(B)/ops/cuda_bf16/%.o: kernels/%.cu $(B)/build-with $(B)/build-with-cuda
	$(call made_by_nvcc,$(NVCC_COMPILE) $(GENCODE) -MMD -MP $(PRECISION_bf16))
$(B)/ops/cuda_fp32.a: $(call ops_objects,cuda_fp32)
$(B)/ops/cuda_bf16.a: $(call ops_objects,cuda_bf16)
$(B)/ptxas_fp32.log: $(call ops_objects,cuda_fp32)
$(B)/ptxas_bf16.log: $(call ops_objects,cuda_bf16)
$(PTXAS_LOGS):
	cat $(^:.o=.ptxas) >$@
# The ops that use tiles or dot products, with these emulated. A program links their archive before the other ops'.
EMULATED_TILES_OPS := attention/cpu attention/decode attention/unfused_cpu matmul/matmul
$(foreach p,amx dot,$(call ops,cpu_$p,$$(COMPILE) $$(PRECISION_$p) -x c,$(EMULATED_TILES_OPS)$(if $(filter amx,$p), fp8/attention_cpu)))

# ---- The program: one copy of the engine per target, level and precision, and a main that picks one ----
# A test's own code is compiled by -O1, in half of the time: the code to be tested lies in the ops' objects.
TEST_FLAGS := $(if $(filter -O3,$(CFLAGS)),-O1)
# Op tests are compiled by -O2: some hold an op to the bits of a formula in a header, where gcc makes FMAs from -O2 on.
OP_TEST_FLAGS := $(if $(filter -O3,$(CFLAGS)),-O2)
# The host's code is compiled by -O2: its loops are over layers and tensors, and -O3 takes half as long again to
# compile. Loops over elements belong to ops.
HOST_FLAGS := $(if $(filter -O3,$(CFLAGS)),-O2)
# An engine is one object of its host code and its copy of the ops. It exports only its entries, since all copies of an
# op have the same names.
OBJCOPY := $(or $(shell $(CC) -print-prog-name=objcopy 2>/dev/null),objcopy)
define merged
$(call quietly,LD,$(@:$(B)/%=%))$(CC) -r -nostdlib -Wl,--force-group-allocation $^ -o $@.all && \
  $(OBJCOPY) --wildcard --keep-global-symbol 'train_c*' $@.all $@ && rm $@.all
endef
$(B)/engine_%.o: $(B)/host_%.o $(call ops_objects,%)
	$(merged)
$(B)/emu/engine_cuda_%.o: $(B)/emu/host_cuda_%.o $(call ops_objects,emu_%) $(EMULATOR)
	$(merged)
$(B)/host_cpu_%.o: train_gpt.c $(B)/build-with
	$(call made,$(COMPILE) $(HOST_FLAGS) -DENGINE=train_cpu_$* $(PRECISION_$*) -c)
# $(call level,LEVEL,SUFFIX): the engines for a level above ARCH, and the table of instructions that they need.
define level
$(B)/host_cpu_%$(2).o: train_gpt.c $(B)/build-with
	$$(call made,$$(call COMPILE_FOR,$$(call arch_flags,$(1))) $$(HOST_FLAGS) -DENGINE=train_cpu_$$*$(2) $$(PRECISION_$$*) -c)
$(foreach p,fp32 bf16,$(call ops,cpu_$p$(2),$$(call COMPILE_FOR,$$(call arch_flags,$(1))) $$(PRECISION_$p) -x c))
$(B)/cpu_features_needed$(2).o: runtime/machine/cpu_features_needed.c $(B)/build-with
	$$(call made,$$(call COMPILE_FOR,$$(call arch_flags,$(1))) -DCPU_FEATURES=cpu_features_needed$(2) -c)
CPU_ENGINES += $(B)/engine_cpu_fp32$(2).o $(B)/engine_cpu_bf16$(2).o $(B)/cpu_features_needed$(2).o
endef
$(foreach l,$(LEVELS),$(eval $(call level,$l,$(call level_suffix,$l))))
$(B)/host_cuda_%.o: train_gpt.c $(B)/build-with $(B)/build-with-cuda
	$(call made,$(NVCC_COMPILE) $(GENCODE) -MMD -MP -DENGINE=train_cuda_$* $(PRECISION_$*) -c)
$(B)/emu/host_cuda_%.o: train_gpt.c $(B)/build-with
	$(call made,$(EMULATE) $(TEST_FLAGS) -DENGINE=train_cuda_$* $(PRECISION_$*) -x c++ -c)
# make would remove them as intermediate files.
.PRECIOUS: $(B)/host_cpu_%.o $(B)/host_cuda_%.o $(B)/emu/host_cuda_%.o $(foreach l,$(LEVELS),$(B)/host_cpu_%$(call level_suffix,$l).o)
COMPILE_MAIN = $(COMPILE) '-DLEVELS(X)=$(LEVEL_ROWS)'
$(B)/main.o: train_gpt.c $(B)/build-with
	$(call made,$(COMPILE_MAIN) -c)
$(B)/main_cuda.o: train_gpt.c $(B)/build-with $(B)/build-with-cuda
	$(call made,$(COMPILE_MAIN) -DHAVE_CUDA -DGPU_ARCHITECTURES='"$(GPU_CODE)"' -c)
$(B)/emu/main.o: train_gpt.c $(B)/build-with
	$(call made,$(COMPILE_MAIN) -DHAVE_CUDA -DGPU_ARCHITECTURES='"the emulator"' -c)
engines = $(B)/$(1)_fp32.o $(B)/$(1)_bf16.o
CPU_ENGINES += $(call engines,engine_cpu)
PROGRAM := $(patsubst runtime/machine/%.c,$(B)/%.o,$(wildcard runtime/machine/cpu_features*.c)) $(B)/commit.o $(LIBRARY)
# The target that the program was linked for last decides whether it must be linked anew: no object's date changes with
# CUDA.
LINKED := $(if $(CUDA),cuda,cpu)
$(if $(filter $(LINKED),$(file <$(B)/linked-for)),,$(eval .PHONY: $(B)/train_gpt))
$(B)/train_gpt: $(B)/main$(if $(CUDA),_cuda).o $(CPU_ENGINES) $(if $(CUDA),$(call engines,engine_cuda)) $(PROGRAM)
	$(call quietly,LINK,$@)$(if $(CUDA),$(NVCC) -Xcompiler -fopenmp $^ $(LDFLAGS:-Wl,%=-Xlinker %) $(LDLIBS) $(LINK_CUDA),$(CC) $(CFLAGS) $^ $(LDFLAGS) $(LDLIBS)) -o $@
	@echo $(LINKED) >$(B)/linked-for
$(B)/emu/train_gpt: $(B)/emu/main.o $(CPU_ENGINES) $(call engines,emu/engine_cuda) $(PROGRAM)
	$(call quietly,LINK,$@)$(CXX) $(CFLAGS) $^ $(LDFLAGS) $(EMULATE_LINK) $(LDLIBS) -o $@
# The program of the short run, without the emulated engine in fp32.
$(B)/emu/train_gpt_bf16: $(B)/emu/main.o $(CPU_ENGINES) $(B)/emu/engine_cuda_bf16.o $(B)/emu/without_fp32.o $(PROGRAM)
	$(call quietly,LINK,$@)$(CXX) $(CFLAGS) $^ $(LDFLAGS) $(EMULATE_LINK) $(LDLIBS) -o $@
$(B)/emu/without_fp32.o: test/emu/without_fp32.c $(B)/build-with
	$(call made,$(COMPILE) -c)
$(B)/emu/libcudnn.so.9: test/emu/cudnn.cpp $(B)/build-with
	$(call made,$(EMULATE) -fPIC -shared $(EMULATE_LINK) -Wl$(comma)-soname$(comma)libcudnn.so.9)
$(B)/emu/libcudnn_%.so.9: test/emu/cudnn_part.cpp $(B)/build-with
	$(call made,$(EMULATE) -fPIC -shared -Wl$(comma)-soname$(comma)$(@F))
$(B)/emu/libcudnn.so.9: | $(patsubst %,$(B)/emu/libcudnn_%.so.9,graph engines_runtime_compiled engines_precompiled heuristic)

# ---- Tests and benchmarks: op_NAME and bench_NAME for each precision, unit_NAME, fuzz_NAME only on its corpus ----
$(foreach p,fp32 bf16,$(call program,test/op_%_$p,test/op_%.c,$$(COMPILE) $$(OP_TEST_FLAGS) $$(PRECISION_$p),$(B)/ops/cpu_$p.a,$$(LDLIBS) -lcmocka))
$(foreach p,fp32 bf16,$(call program,emu/op_%_$p,test/op_%.c,$$(EMULATE_TEST) $$(PRECISION_$p) -x c++,$(B)/ops/emu_$p.a,$$(EMULATE_LINK) $$(RUNTIME_LDLIBS) -lcmocka))
$(foreach p,fp32 bf16,$(call program,test/models_$p,test/models.c,$$(COMPILE_AS_CXX) $$(TEST_FLAGS) $$(PRECISION_$p) -x c++,$(B)/ops/cpu_$p.a,$$(LDLIBS) -lcmocka))
$(foreach p,fp32 bf16,$(call program,emu/models_$p,test/models.c,$$(EMULATE_TEST) $$(PRECISION_$p) -x c++,$(B)/ops/emu_$p.a,$$(EMULATE_LINK) $$(RUNTIME_LDLIBS) -lcmocka))
# Tests on emulated tiles or dot products: the emulated ops' archive comes first. The models' object is bf16's.
$(foreach p,amx dot,$(call program,test/op_%_$p,test/op_%.c,$$(COMPILE) $$(OP_TEST_FLAGS) $$(PRECISION_$p),$(B)/ops/cpu_$p.a $(B)/ops/cpu_bf16.a,$$(LDLIBS) -lcmocka))
$(foreach p,amx dot,$(eval $(call linked,test/models_$p,-x c++,$(B)/ops/cpu_$p.a $(B)/ops/cpu_bf16.a,$$(LDLIBS) -lcmocka,$(B)/test/models_bf16.o)))
$(foreach p,fp32 bf16,$(call program,bench_%_$p,test/bench_%.c,$$(COMPILE) $$(PRECISION_$p),$(B)/ops/cpu_$p.a,$$(LDLIBS)))
$(foreach s,test/unit_%.c test/emu/unit_%.cu test/cuda/unit_%.cu,$(call program,emu/unit_%,$s,$$(EMULATE) $$(TEST_FLAGS) $$(PRECISION_bf16) -x c++,$(B)/ops/emu_bf16.a,$$(EMULATE_LINK) $$(RUNTIME_LDLIBS) -lcmocka))
$(call program,test/unit_%,test/unit_%.c,$$(COMPILE_BASELINE) $$(TEST_FLAGS),$(B)/ops/cpu_fp32.a,$$(LDLIBS) -lcmocka)
# The units that include neither a kernel nor a part of the model are linked with the sanitized library.
SANITIZED_UNITS := $(shell grep -LE '^.include "(kernels|memory|model|optimizer|run|zero)/|^.include "[a-z_0-9]*\.cuh"|^.include "test/.*\.cuh?' test/unit_*.c)
$(foreach u,$(SANITIZED_UNITS:test/%.c=%),$(call program,test/$u,test/$u.c,$$(COMPILE_BASELINE) $$(SANITIZED_FLAGS),$(SANITIZED_LIBRARY),$$(LDLIBS) -lcmocka))
$(call program,test/fuzz_%,test/fuzz/fuzz_%.c,$$(COMPILE_BASELINE) $$(SANITIZED_FLAGS) -DFUZZ_CORPUS='"test/fuzz/corpus/$$*"',$(SANITIZED_LIBRARY),$$(RUNTIME_LDLIBS))

# Tests of whole models are in one program for each target and precision, since the engine takes longer to compile than
# any of these tests. The lists of tests name such a test PROGRAM:TEST. op_NAME can also be built as a program of its
# own, like any op's test.
MODELS := $(patsubst test/%.c,%,$(shell sed -n 's/^#include "\(test\/op_.*\)"/\1/p' test/models.c))
COMPILE_AS_CXX = $(patsubst -std=gnu11,-std=gnu++17,$(COMPILE)) -Wno-maybe-uninitialized -Wno-uninitialized # as EMULATE
in_models = $(foreach t,$(1),$(call in_model,$t,$(lastword $(subst _, ,$t))))
in_model = $(if $(filter $(MODELS:=_$(2)),$(notdir $(1))),$(dir $(1))models_$(2):$(patsubst %_$(2),%,$(notdir $(1))),$(1))
programs = $(sort $(foreach t,$(1),$(firstword $(subst :, ,$t))))

OPS := $(patsubst test/%.c,%,$(wildcard test/op_*.c))
UNITS := $(patsubst test/%.c,%,$(wildcard test/unit_*.c))
BENCHES := $(patsubst test/%.c,%,$(wildcard test/bench_*.c))
FUZZ := $(patsubst test/fuzz/fuzz_%.c,%,$(wildcard test/fuzz/fuzz_*.c))
# op_gpt's many steps on emulated tiles take too long under the sanitizers, which see the same code in op_golden.
AMX_OPS := $(filter op_matmul op_attention op_fp8_attention op_golden $(if $(SANITIZE),,op_gpt),$(OPS))
DOT_OPS := $(filter op_matmul op_attention op_attention_decode op_golden,$(OPS))
# Ops tested on the emulator: all that have CUDA kernels. op_random and op_vector_math test code that both targets
# share; op_fit times the cpu target's throttled copies; op_zero holds the schedule to the plan by the cpu target's work
# thread.
# Tests in bf16 only: in fp32 whole models would run long, and show what op_golden and op_zoo show. op_huggingface is in
# fp32 only: it moves bytes, in either precision alike.
EMU_OPS := $(filter-out op_random op_vector_math op_zero op_fit,$(OPS))
EMU_BF16_ALONE := op_gpt op_block op_frozen_format op_fp8_gpt op_lora op_offload op_offload_units op_optimizer op_state_format
EMU_TESTS := $(call in_models,$(addprefix $(B)/emu/,unit_cudnn unit_cudnn_rules unit_cudnn_fp8 unit_check_attention unit_check_copies unit_faults unit_model unit_faults_sm90 unit_model_sm90 unit_tuning unit_sm90 unit_collectives unit_transfers unit_work_segments \
  $(patsubst %,%_fp32,$(filter-out $(EMU_BF16_ALONE),$(EMU_OPS))) $(patsubst %,%_bf16,$(filter-out op_huggingface,$(EMU_OPS)))))
# In bf16 only: op_fp8_gpt, since FP8 is trained with bf16; op_fit and op_offload, since neither what the search finds
# nor what is copied depends on the precision.
CPU_TESTS := $(call in_models,$(addprefix $(B)/test/,$(UNITS) $(FUZZ:%=fuzz_%) $(patsubst %,%_fp32,$(filter-out op_fp8_gpt op_fit op_offload,$(OPS))) $(OPS:=_bf16)))
# `make quick` leaves out emulated tiles and dot products, the emulated GPU, and the tests in Python, which train whole
# runs. It also leaves out what takes half of the remaining time: ranks, kills, timed copies, FP8, offload, and one
# precision of the longest ops.
NOT_QUICK := unit_checkpoint unit_plans unit_architectures unit_control unit_control_start unit_host_collectives fuzz_matmul_algorithms \
  fuzz_tokenizer op_attention_fp32 op_block_bf16 $(foreach o,op_zero op_fit op_offload op_offload_units op_muon_model op_fp8_gpt op_matmul_fp8,$o_fp32 $o_bf16)
QUICK_TESTS := $(filter-out $(call in_models,$(NOT_QUICK:%=$(B)/test/%)),$(CPU_TESTS))
# Only `make test-all` runs these: ZeRO and products in FP8 in fp32, which bf16 shows as well; on the emulator each op
# in fp32, since both precisions share the kernels; and op_gpt on AMX's tiles, which op_golden shows.
LONG_PROGRAMS := $(call in_models,$(B)/test/op_zero_fp32 $(B)/test/op_matmul_fp8_fp32 $(patsubst %,$(B)/emu/%_fp32,$(filter-out $(EMU_BF16_ALONE),$(EMU_OPS))) $(B)/test/op_gpt_amx)
TESTS := $(filter-out $(LONG_PROGRAMS),$(CPU_TESTS) $(call in_models,$(AMX_OPS:%=$(B)/test/%_amx) $(DOT_OPS:%=$(B)/test/%_dot)) $(if $(SANITIZE),,$(EMU_TESTS)))
# $(call long_of,TESTS): those that read LONG_TESTS, themselves or by setup.h. In the long run other tests do what they do in `make test`.
LONG_READERS = $(basename $(notdir $(shell grep -lE '\b(in_long_run|long_test|takes_case)\b|import .*\bchosen\b|"test/(setup|forms)\.h"' test/*.c test/*/*.cu test/test_*.py)))
test_name = $(basename $(lastword $(subst :, ,$(patsubst %_dot,%,$(patsubst %_amx,%,$(patsubst %_bf16,%,$(patsubst %_fp32,%,$(notdir $(1)))))))))
long_of = $(call long_among,$(LONG_READERS),$(1))
long_among = $(foreach t,$(2),$(if $(filter $(1),$(call test_name,$t)),$t))
EMU_PROGRAM := $(if $(SANITIZE),,$(B)/emu/train_gpt_bf16)
$(call programs,$(EMU_TESTS)) $(MODELS:%=$(B)/emu/%_fp32) $(MODELS:%=$(B)/emu/%_bf16) $(B)/emu/train_gpt $(B)/emu/train_gpt_bf16: | $(B)/emu/libcudnn.so.9

.PHONY: all help cuda emu ptxas demo test test-programs test-all test-long test-environments test-levels quick quick-programs check-headers fuzz bench clean compile_commands.json format format-check reference install uninstall deb
help:
	@sed -n "s/^# \(make.*  .*\)/\1/p" Makefile
SUBMAKE = +$(MAKE) -j$(JOBS) --no-print-directory
# A test that passed runs again only where something that its result depends on has changed; AGAIN=1 runs all tests.
test:
	scripts/setup.sh test
	$(SUBMAKE) WERROR=1 test-programs check-headers
	TRAIN_GPT=$(B)/train_gpt TRAIN_GPT_CUDA=$(EMU_PROGRAM) test/run.py $(wildcard test/test_*.py) $(TESTS)
test-programs: $(B)/train_gpt $(B)/tokenize_text $(call programs,$(TESTS)) $(EMU_PROGRAM) $(if $(NATIVE),reference)
quick: quick-programs
	test/run.py $(QUICK_TESTS)
quick-programs: $(call programs,$(QUICK_TESTS))
# The tests that a user's environment can disturb run in each environment of test/environments.sh.
test-environments: $(B)/train_gpt $(UNITS:%=$(B)/test/%)
	BUILD=$(B) test/environments.sh
test-levels: $(B)/train_gpt
	$(SUBMAKE) WERROR=1 CUDA= ARCH=$(GENERIC_$(MACHINE)) B=$(B)/levels
	TRAIN_GPT=$(B)/train_gpt TRAIN_GPT_LEVELS=$(B)/levels/train_gpt test/run.py test/test_levels.py
# All of `make test`, with the long loops and classes that it leaves out (LONG_TESTS), and LONG_PROGRAMS.
test-all: test-programs $(if $(SANITIZE),,$(B)/emu/train_gpt) $(call programs,$(LONG_PROGRAMS))
	LONG_TESTS=1 TRAIN_GPT=$(B)/train_gpt TRAIN_GPT_CUDA=$(if $(SANITIZE),,$(B)/emu/train_gpt) test/run.py $(wildcard test/test_*.py) $(TESTS) $(LONG_PROGRAMS)
# The rows of test/long_rows.tsv take longer, or need more than every machine has; ROW=name runs one row.
test-long:
	python3 test/long.py $(ROW)
emu: $(B)/emu/train_gpt $(call programs,$(EMU_TESTS))
# Checks that each header compiles by itself, as C in fp32 and, in the long run, as C++ in bf16, and that each benchmark
# compiles in fp32 and in bf16. A header of the library's or of an op's source compiles by itself in that source, which
# includes it first (test/test_floors.py). Each of run/ has the whole engine below it: these are checked in the long run.
HEADERS := $(filter-out kernels/ptx.cuh kernels/ptx_sm90.cuh kernels/attention/sm80%.cuh kernels/attention/sm90%.cuh $(filter-out kernels/cudnn/attention.cuh,$(wildcard kernels/cudnn/*.cuh)) kernels/matmul/choices.cuh kernels/matmul/cublaslt.cuh kernels/matmul/candidates.cuh kernels/matmul/proof.cuh kernels/matmul/tuning.cuh,$(wildcard *.cuh *.h */*.cuh kernels/*/*.cuh config/*.h run/*.h formats/*.h runtime/*.h runtime/*/*.h))
CHECKED = -I. $(DEFINES) -D_GNU_SOURCE $(ARCH_FLAGS) -fopenmp $(WARNINGS) -fsyntax-only
OWN_HEADERS := $(LIBRARY_SOURCES:.c=.h) $(OPS_SOURCES:.cu=.cuh)
CHECKS := $(patsubst %,$(B)/checked/%,$(filter-out $(OWN_HEADERS) $(if $(LONG_TESTS),,run/%),$(HEADERS))) $(foreach b,$(BENCHES),$(B)/checked/test/$b.c) $(if $(LONG_TESTS),$(HEADERS:%=$(B)/checked/as_cxx/%))
check-headers: $(CHECKS)
$(HEADERS:%=$(B)/checked/%): $(B)/checked/%: % $(B)/build-with
	@mkdir -p $(@D)
	$(Q)$(CC) -x c -std=gnu11 $(CHECKED) -MMD -MP -MF $@.d -MT $@ -include $< /dev/null
	@touch $@
$(HEADERS:%=$(B)/checked/as_cxx/%): $(B)/checked/as_cxx/%: % $(B)/build-with
	@mkdir -p $(@D)
	$(Q)$(CXX) -x c++ -std=c++17 $(CHECKED) -DPRECISION_BF16 -MMD -MP -MF $@.d -MT $@ -include $< /dev/null
	@touch $@
$(B)/checked/test/bench_%.c: test/bench_%.c $(B)/build-with
	@mkdir -p $(@D)
	$(Q)$(CC) -x c -std=gnu11 $(CHECKED) -MMD -MP -MF $@.d -MT $@ $<
	$(Q)$(CC) -x c -std=gnu11 $(CHECKED) -DPRECISION_BF16 $<
	@touch $@

# Runs each parser on input that libFuzzer grows from the parser's corpus; fuzz-NAME runs one parser. $(B)/fuzz keeps
# inputs that did harm and, in reached_NAME, inputs that reached new code.
CLANG ?= clang
FUZZ_SECONDS ?= 60
fuzz:
	scripts/setup.sh fuzz
	$(SUBMAKE) $(FUZZ:%=fuzz-%)
# Keeps programs that make would remove as intermediate files. An empty list would make every file secondary, and
# missing files would not be built: hence `none`.
.SECONDARY: $(or $(FUZZ:%=$(B)/fuzz/%),none)
fuzz-%: $(B)/fuzz/%
	@mkdir -p $(B)/fuzz/reached_$*
	@$< -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
	  -artifact_prefix=$(B)/fuzz/$*- $(B)/fuzz/reached_$* test/fuzz/corpus/$* >$(B)/fuzz/$*.log 2>&1 || \
	  { tail -n 60 $(B)/fuzz/$*.log; echo "fuzz: $*: failed"; exit 1; }
	@sed -n 's/^stat::number_of_executed_units: */fuzz: $*: no harm in runs: /p' $(B)/fuzz/$*.log
# The library stands for every parser's headers: of several sources the target's own .d names only the last source's.
$(B)/fuzz/%: test/fuzz/fuzz_%.c test/fuzz/fuzz.h $(LIBRARY) $(B)/build-with
	$(call made,$(CLANG) -std=gnu11 $(CPPFLAGS) -g -O1 -fsanitize=fuzzer $(SANITIZERS) $(WARNINGS),$(LIBRARY_SOURCES) $(LDFLAGS) $(RUNTIME_LDLIBS))

# compile_commands.json has each file's flags, for editors. FORMATTED: the files that .clang-format lays out, all but
# the tables that a script writes.
CLANG_FORMAT ?= clang-format
FORMATTED = $(filter-out formats/unicode_tables.%,$(shell git ls-files '*.c' '*.h' '*.cuh' '*.cu' '*.cpp'))
compile_commands.json:
	$(MAKE) -nB --no-print-directory CUDA= all test-programs $(OPS:%=$(B)/test/%_bf16) | scripts/compile_commands.py $(HEADERS) >$@
format:
	@$(CLANG_FORMAT) -i $(FORMATTED)
format-check:
	@$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)

include scripts/install.mk # the manual page, completions, install, uninstall and deb
# TEXT: a file or a folder to train on; the default is real text that every build machine has.
TEXT ?= /usr/include
demo:
	@scripts/setup.sh demo >/dev/null
	@$(SUBMAKE) $(if $(V),,-s) all
	@scripts/demo.sh $(TEXT)
bench:
	scripts/setup.sh build
	$(SUBMAKE) $(foreach b,$(BENCHES),$(B)/$b_fp32 $(B)/$b_bf16) $(B)/train_gpt
	scripts/bench.sh $(B)
clean:
	rm -rf build

-include $(wildcard $(B)/*.d $(B)/ops/*/*.d $(B)/ops/*/*/*.d $(B)/library/*/*.d $(B)/library/*/*/*.d $(B)/sanitized/*/*.d $(B)/sanitized/*/*/*.d $(B)/test/*.d $(B)/emu/*.d $(B)/fuzz/*.d $(B)/checked/*.d $(B)/checked/*/*.d $(B)/checked/*/*/*.d $(B)/checked/as_cxx/*/*/*.d)
