# Builds what scripts/gpu_check.sh runs, by the Makefile's own rules for nvcc. gpu-STAGE is the programs of a stage:
#   make -f scripts/gpu_check.mk CUDA=yes gpu-unit gpu-attention ...
# gpu-rehearsal is all programs on the emulator (CUDA=). gpu-programs is what a first visit to a GPU needs, built elsewhere
# and brought along by scripts/gpu_pack.sh --programs.
include Makefile
G := $(B)/cuda
GPU_OPS := $(filter-out zero,$(patsubst test/op_%.c,%,$(wildcard test/op_*.c)))
GPU_UNITS := $(patsubst test/cuda/%.cu,$G/%,$(wildcard test/cuda/unit_*.cu))
# The tests that take longest to compile come first: a parallel build would wait for them at its end.
GPU_LONG_OPS := $(filter gpt block golden zoo huggingface,$(GPU_OPS))
GPU_FP8_OPS := $(foreach o,$(GPU_OPS),$(if $(findstring fp8,$o),$o))
GPU_OTHER_OPS := $(GPU_LONG_OPS) $(filter-out attention $(GPU_LONG_OPS) $(GPU_FP8_OPS),$(GPU_OPS))
GPU_MODEL_OPS := gpt matmul
# fp8_gpt, fit and offload have no fp32 test (CPU_TESTS).
gpu_op_tests = $(foreach o,$(1),$G/op_$o_bf16 $(if $(filter fp8_gpt fit offload,$o),,$G/op_$o_fp32))
GPU_QUICK := $G/op_attention_quick $(foreach o,activation norm rope loss,$G/op_$o_bf16)
GPU_TOOLS := attention_bench device_rates memory_probe
GPU_COMPILE = $(NVCC_COMPILE) $(GENCODE) -MMD -MP
# An op's test reads device memory from the host, and its kernels' waits end after 4 s and say where; so kernels that
# wait are compiled a second time, for these tests. compute-sanitizer may make any wait long: GPU_QUICK has no limit.
# Benchmarks and units have plain device memory.
GPU_OP_COMPILE = $(GPU_COMPILE) -DDEVICE_MEMORY_MANAGED -include test/cuda/host_visible_memory.h
GPU_WAIT_LIMIT := -DDEVICE_WAIT_LIMIT=4
$(B)/ops/wait_fp32/%.o: kernels/%.cu $(B)/build-with $(B)/build-with-cuda
	$(call made_by_nvcc,$(GPU_COMPILE) $(GPU_WAIT_LIMIT))
$(B)/ops/wait_bf16/%.o: kernels/%.cu $(B)/build-with $(B)/build-with-cuda
	$(call made_by_nvcc,$(GPU_COMPILE) $(GPU_WAIT_LIMIT) $(PRECISION_bf16))
$(foreach p,fp32 bf16,$(eval $(B)/ops/wait_$p.a: $(B)/ops/wait_$p/attention/sm90_forward.o $(B)/ops/wait_$p/attention/sm90_backward.o))

.PHONY: gpu-unit gpu-attention gpu-model gpu-attention-table gpu-train-table gpu-kernels gpu-fp8 gpu-ops gpu-curve gpu-ranks \
  gpu-sanitize gpu-rehearsal gpu-programs
gpu-programs: gpu-unit gpu-attention gpu-model gpu-curve gpu-attention-table gpu-train-table
gpu-train-table gpu-kernels gpu-fp8 gpu-curve gpu-ranks: $(B)/train_gpt
gpu-attention: $G/op_attention_bf16 $G/op_attention_fp32 $G/memory_probe
gpu-model: $(GPU_MODEL_OPS:%=$G/op_%_bf16) $G/memory_probe
gpu-attention-table: $G/attention_bench $G/device_rates
gpu-ops: $(call gpu_op_tests,$(GPU_OTHER_OPS)) $G/memory_probe
gpu-fp8: $(call gpu_op_tests,$(GPU_FP8_OPS)) $G/memory_probe
gpu-sanitize: $(GPU_QUICK) $G/memory_probe
gpu-unit: $(GPU_UNITS)
GPU_REHEARSED := $(patsubst $G/%,$(B)/emu/%,\
  $(sort $(GPU_UNITS) $(call gpu_op_tests,$(GPU_OPS)) $(GPU_QUICK) $(GPU_TOOLS:%=$G/%)))
gpu-rehearsal: $(B)/emu/train_gpt $(GPU_REHEARSED)
$(GPU_REHEARSED): | $(B)/emu/libcudnn.so.9

$G/op_%_fp32.o: test/op_%.c $(B)/build-with $(B)/build-with-cuda | $G
	$(call quietly,NVCC,$< $(@:$(B)/%=%))$(GPU_OP_COMPILE) $(GPU_WAIT_LIMIT) -c $< -o $@
$G/op_%_bf16.o: test/op_%.c $(B)/build-with $(B)/build-with-cuda | $G
	$(call quietly,NVCC,$< $(@:$(B)/%=%))$(GPU_OP_COMPILE) $(GPU_WAIT_LIMIT) $(PRECISION_bf16) -c $< -o $@
# Small shapes, for compute-sanitizer.
$G/op_%_quick.o: test/op_%.c $(B)/build-with $(B)/build-with-cuda | $G
	$(call quietly,NVCC,$< $(@:$(B)/%=%))$(GPU_OP_COMPILE) $(PRECISION_bf16) -DQUICK -c $< -o $@
$G/%.o: test/cuda/%.cu $(B)/build-with $(B)/build-with-cuda | $G
	$(call quietly,NVCC,$< $(@:$(B)/%=%))$(GPU_COMPILE) $(PRECISION_bf16) -c $< -o $@
GPU_LINK = $(call quietly,LINK,$(@:$(B)/%=%))$(NVCC) -Xcompiler -fopenmp $(filter %.o %.a,$^) $(LDFLAGS:-Wl,%=-Xlinker %) $(LDLIBS) $(LINK_CUDA) -lcmocka -o $@
$G/op_%_fp32: $G/op_%_fp32.o $(B)/ops/wait_fp32.a $(B)/ops/cuda_fp32.a $(LIBRARY)
	$(GPU_LINK)
$G/op_%_bf16: $G/op_%_bf16.o $(B)/ops/wait_bf16.a $(B)/ops/cuda_bf16.a $(LIBRARY)
	$(GPU_LINK)
$G/%: $G/%.o $(B)/ops/cuda_bf16.a $(LIBRARY)
	$(GPU_LINK)
# What ptxas says of the kernels that attention_bench times.
$G/ptxas_attention.log: $(foreach o,attention/sm80 attention/sm90_forward attention/sm90_backward,$(B)/ops/cuda_bf16/$o.o)
	cat $(^:.o=.ptxas) >$@
$G/attention_bench: $G/ptxas_attention.log
$(call program,emu/op_%_quick,test/op_%.c,$$(EMULATE_TEST) $$(PRECISION_bf16) -DQUICK -x c++,$(B)/ops/emu_bf16.a,$$(EMULATE_LINK) $$(RUNTIME_LDLIBS) -lcmocka)
$(foreach p,$(GPU_TOOLS),$(call program,emu/$p,test/cuda/$p.cu,$$(EMULATE) $$(PRECISION_bf16) -x c++,$(B)/ops/emu_bf16.a,$$(EMULATE_LINK) $$(RUNTIME_LDLIBS)))
.PRECIOUS: $G/op_%_fp32.o $G/op_%_bf16.o $G/op_%_quick.o $G/%.o # make would remove them as intermediate files
$G:
	mkdir -p $@
-include $(wildcard $G/*.d)
