# What scripts/gpu_check.sh builds beside the engine, by the Makefile's own rules for nvcc: the op tests for the GPU, and
# the attention benchmark. make -f scripts/gpu_check.mk CUDA=yes gpu-check
include Makefile
G := $(B)/cuda
GPU_OPS := $(filter-out zero,$(patsubst test/op_%.c,%,$(wildcard test/op_*.c)))
GPU_TESTS := $(foreach o,$(GPU_OPS),$G/op_$o_fp32 $G/op_$o_bf16)
# Tests look at device memory from the host.
GPU_CHECK_COMPILE = $(NVCC_COMPILE) $(GENCODE) -DDEVICE_MEMORY_MANAGED -MMD -MP

.PHONY: gpu-check
gpu-check: $(GPU_TESTS) $G/op_attention_quick $G/attention_bench
$G/op_%_fp32.o: test/op_%.c | $G
	$(GPU_CHECK_COMPILE) -c $< -o $@
$G/op_%_bf16.o: test/op_%.c | $G
	$(GPU_CHECK_COMPILE) $(PRECISION_bf16) -c $< -o $@
# small shapes, for compute-sanitizer
$G/op_%_quick.o: test/op_%.c | $G
	$(GPU_CHECK_COMPILE) $(PRECISION_bf16) -DQUICK -c $< -o $@
# its log shows what ptxas spilled
$G/attention_bench.o: test/cuda/attention_bench.cu | $G
	$(GPU_CHECK_COMPILE) $(PRECISION_bf16) -Xptxas -v -c $< -o $@ 2>$G/ptxas_attention.log || { cat $G/ptxas_attention.log; exit 1; }
$G/%: $G/%.o
	$(NVCC) -Xcompiler -fopenmp $< $(LDFLAGS:-Wl,%=-Xlinker %) $(LDLIBS) $(LINK_CUDA) -lcmocka -o $@
.SECONDARY:
$G:
	mkdir -p $@
-include $(wildcard $G/*.d)
