# A part of the Makefile: looks for nvcc and CUDA's libraries where they are wanted. Sets CUDA (empty: only the cpu
# target) and, where CUDA is not empty, NVCC_COMPILE, GENCODE and LINK_CUDA.
NVCC := $(or $(NVCC),$(firstword $(wildcard $(CUDA_HOME:=/bin/nvcc)) $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc)))
GPU := $(or $(wildcard /dev/nvidia0),$(shell nvidia-smi -L >/dev/null 2>&1 && echo yes))
NEEDS_COMPILER := $(filter-out clean format format-check,$(or $(MAKECMDGOALS),all))
CUDA ?= $(if $(SANITIZE),,$(and $(NEEDS_COMPILER),$(NVCC),$(GPU),yes))
ifneq ($(CUDA),)
  ways_out := make CUDA= builds for the cpu only
  ifeq ($(shell command -v $(NVCC) 2>/dev/null),)
    $(error no nvcc in CUDA_HOME$(comma) PATH or /usr/local/cuda$(NVCC:%=, nor is % one); $(ways_out))
  endif
  # Libraries are looked for in CUBLASLT_DIR (cuBLASLt) or NCCL_HOME (NCCL), then in the toolkit's folders, the
  # system's, and the nvidia wheels that PyTorch comes with.
  WHEELS := $(shell $(or $(PYTHON),python3) -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null)
  CUDA_DIRS := $(CUDA_HOME) $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))) /usr/local/cuda /usr $(foreach w,$(WHEELS),$w/cu13 $w/cublas $w/nvtx $w/nccl)
  find_include = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(patsubst %/$(1),%,$(wildcard $d/include/$(1)))))
  find_library = $(firstword $(foreach d,$(2) $(CUDA_DIRS),$(foreach l,lib64 lib lib/$(MULTIARCH) targets/$(MACHINE:aarch64=sbsa)-linux/lib, \
    $(wildcard $d/$l/$(1).so $d/$l/$(1).so.*))))
  CUBLASLT_INCLUDE := $(call find_include,cublasLt.h,$(CUBLASLT_DIR))
  CUBLASLT := $(call find_library,libcublasLt,$(CUBLASLT_DIR))
  ifeq ($(and $(CUBLASLT_INCLUDE),$(CUBLASLT)),)
    $(error no cublasLt.h or no libcublasLt.so in $(CUBLASLT_DIR) $(CUDA_DIRS); CUBLASLT_DIR= names the folder that holds \
      include/ and lib/, $(ways_out))
  endif
  NVTX_INCLUDE := $(call find_include,nvtx3/nvToolsExt.h)
  ifeq ($(NVTX_INCLUDE),)
    $(error no nvtx3/nvToolsExt.h in $(CUDA_DIRS); install CUDA's NVTX$(comma) or $(ways_out))
  endif
  # Without NCCL the ranks have only the host's collectives.
  NCCL_INCLUDE := $(call find_include,nccl.h,$(NCCL_HOME))
  NCCL := $(if $(NCCL_INCLUDE),$(call find_library,libnccl,$(NCCL_HOME)))
  # -Xlinker, since nvcc takes no name that ends in .so.13, the only name that a wheel has.
  LINK_CUDA := $(foreach l,$(CUBLASLT) $(NCCL),-Xlinker $l,-rpath,$(dir $l))
  # cuDNN is loaded by name at run time; the rpath makes the loader look into a wheel's folder.
  CUDNN := $(firstword $(wildcard $(foreach w,$(WHEELS),$w/cudnn/lib/libcudnn.so.9)))
  LINK_CUDA += $(if $(CUDNN),-Xlinker -rpath$(comma)$(dir $(CUDNN)))
  # nvcc's own folder is left out: gcc drops a -I folder that -idirafter names again, and another CUDA's headers would
  # come first.
  CUDA_INCLUDES := $(filter-out $(realpath $(dir $(realpath $(NVCC)))../include), \
    $(realpath $(sort $(CUBLASLT_INCLUDE) $(NVTX_INCLUDE) $(NCCL_INCLUDE))))
  # GPU_ARCH is native, release, or a list as 80,90a, which gets no PTX.
  # release: machine code for each kind of GPU that the engine runs on and nvcc knows (10.0's runs on 10.3, 12.0's on
  # 12.1), and PTX for newer GPUs and 11.0, which a driver compiles at the first start. The PTX is 9.0's: not all of
  # these GPUs take a newer PTX. 90 becomes 90a, since plain sm_90 has no wgmma.
  # native: this GPU, or release's code where nvidia-smi can't name it: nvcc's own native is not known to mean sm_90a.
  RELEASE_CODE := 80 86 89 90a 100 120
  GPU_ARCH ?= $(if $(RELEASE),release,$(if $(GPU),native,release))
  CAPABILITY := $(if $(filter native,$(GPU_ARCH)),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .))
  NVCC_CODE := $(filter sm_%,$(shell $(NVCC) --list-gpu-code 2>/dev/null))
  RELEASE_CODE := $(if $(NVCC_CODE),$(foreach a,$(RELEASE_CODE),$(if $(filter sm_$(a:a=),$(NVCC_CODE)),$a)),$(RELEASE_CODE))
  ASKED_CODE := $(filter-out native release,$(subst $(comma), ,$(GPU_ARCH)))
  CODE := $(patsubst sm_%,%,$(or $(CAPABILITY),$(ASKED_CODE),$(RELEASE_CODE)))
  gencode = -gencode arch=compute_$(1),code=sm_$(1)
  GENCODE := $(foreach a,$(patsubst 90,90a,$(CODE)),$(call gencode,$a)) \
    $(if $(ASKED_CODE)$(CAPABILITY),,-gencode arch=compute_90$(comma)code=compute_90)
  GPU_CODE := $(sort $(patsubst code=%,%,$(filter code=%,$(subst $(comma), ,$(GENCODE)))))
  # CUDA_INCLUDES come last, or a wheel's headers would go before the headers of nvcc's own version. Warnings left out:
  # of pragmas that are the other compiler's (unknown-pragmas, 1675), of gcc's own vector intrinsics (uninitialized),
  # and of functions that one architecture does not use (177).
  NVCC_COMPILE = $(NVCC) -x cu -std=c++17 -forward-unknown-opts -I. -D_GNU_SOURCE -DTARGET_CUDA -DPCRE2_CODE_UNIT_WIDTH=8 $(CFLAGS) $(ARCH_FLAGS) -lineinfo \
    $(MPI_FLAGS) $(if $(NCCL),-DHAVE_NCCL) $(DEPS:%=-isystem %/include) $(CUDA_INCLUDES:%=-Xcompiler=-idirafter,%) \
    $(if $(WERROR),-Werror all-warnings) $(filter-out -Werror,$(WARNINGS)) -Wno-unknown-pragmas -Wno-maybe-uninitialized -Wno-uninitialized $(NOT_UNIQUE) \
    -diag-suppress 177,1675 --threads 3
endif
define BUILD_WITH_CUDA
$(shell $(NVCC) --version 2>&1 | tail -n 1)
$(filter-out -Werror all-warnings,$(NVCC_COMPILE)) $(GENCODE) $(LINK_CUDA)
endef

cuda:
	+$(MAKE) --no-print-directory CUDA=yes all
# Writes a line for each kernel, precision and architecture of the release; fails where a kernel spills more than the
# script allows.
ptxas:
	+$(MAKE) --no-print-directory CUDA=yes GPU_ARCH=release $(B)/ptxas.txt
PTXAS_LOGS := $(B)/ptxas_fp32.log $(B)/ptxas_bf16.log
$(B)/ptxas.txt: scripts/ptxas_table.py $(PTXAS_LOGS)
	$^ >$@ || { mv $@ $@.failed; exit 1; }
