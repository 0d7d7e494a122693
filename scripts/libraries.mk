# A part of the Makefile: the machine that CC compiles for, and its libraries. ARCH is native by default; for a cross
# compiler it is any CPU of that kind, and MPI is left out, since the MPI here is this machine's.
GENERIC_x86_64 := x86-64
GENERIC_aarch64 := armv8-a
MACHINE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
NATIVE := $(filter $(shell uname -m),$(MACHINE))
ARCH ?= $(if $(NATIVE),native,$(GENERIC_$(MACHINE)))
MULTIARCH := $(or $(shell $(CC) -print-multiarch 2>/dev/null),$(MACHINE)-linux-gnu)
# What scripts/setup.sh --into .deps unpacked comes before the system's libraries. Unpacked libraries need each other,
# and an RPATH, unlike a RUNPATH, holds for the libraries that a library needs. The RPATH is relative to the program
# (one to four folders below the root), since the root's path may have a space in it.
DEPS ?= $(wildcard .deps/usr)
ifneq ($(DEPS),)
  DEPS_LIB := $(DEPS)/lib/$(MULTIARCH)
  DEFINES += -isystem $(DEPS)/include -isystem $(DEPS)/include/$(MULTIARCH)
  LDFLAGS += -L$(DEPS_LIB) -Wl,-rpath-link,$(DEPS_LIB) -Wl,--disable-new-dtags $(foreach up,.. ../.. ../../.. ../../../..,$(foreach d,\
    $(DEPS_LIB) $(DEPS_LIB)/openblas-openmp,-Wl,-rpath,$(if $(filter /%,$d),$d,'$$ORIGIN/$(up)/$d')))
endif
# Needed: jansson for JSON, xxHash for checksums of checkpoints, PCRE2 for the patterns by which tokenizers split text.
# oneDNN and OpenBLAS are used where they are found; ONEDNN= and OPENBLAS= leave them out. Without oneDNN and OpenBLAS
# the plain OpenMP loops remain.
DEFINES += -DPCRE2_CODE_UNIT_WIDTH=8
NEEDED := jansson.h xxhash.h pcre2.h
FOUND := $(shell for h in $(NEEDED) oneapi/dnnl/dnnl.h; do \
  printf '\043include <%s>\n' $$h | $(CC) $(DEFINES) -E -x c - >/dev/null 2>&1 && echo $$h; done)
MISSING := $(filter-out $(FOUND),$(NEEDED))
ONEDNN ?= $(filter %dnnl.h,$(FOUND))
# Debian keeps each BLAS in a folder of its own; /usr/include/cblas.h may be any BLAS's.
OPENBLAS ?= yes
OPENBLAS_INCLUDE ?= $(if $(OPENBLAS),$(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/include/$(MULTIARCH)/openblas-openmp $r/include/openblas))))
OPENBLAS_LIB := $(firstword $(wildcard $(foreach r,$(DEPS) /usr,$r/lib/$(MULTIARCH)/openblas-openmp/libopenblas.so)) -lopenblas)
# MPI: the flags that mpicc adds. MPI=NAME takes another mpicc, MPI= leaves MPI out. --as-needed: a program that calls
# no MPI does not load it.
MPI ?= $(if $(NATIVE),mpicc)
MPI_SHOW := $(if $(MPI),$(shell $(MPI) -show 2>/dev/null))
MPI_FLAGS := $(if $(MPI_SHOW),-DHAVE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_SHOW))))
MPI_LIBS := $(filter -l%,$(MPI_SHOW))
DEFINES += $(if $(ONEDNN),-DHAVE_ONEDNN) $(if $(OPENBLAS_INCLUDE),-DHAVE_OPENBLAS -I$(OPENBLAS_INCLUDE)) $(MPI_FLAGS)
LDFLAGS += $(if $(MPI_SHOW),$(filter-out %-new-dtags,$(filter -L% -Wl%,$(MPI_SHOW))) -Wl$(comma)--as-needed)
RUNTIME_LDLIBS := -ljansson -lpcre2-8 -lm -ldl $(MPI_LIBS)
LDLIBS += $(RUNTIME_LDLIBS) $(if $(ONEDNN),-ldnnl) $(if $(OPENBLAS_INCLUDE),$(OPENBLAS_LIB))
