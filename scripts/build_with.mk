# A part of the Makefile: $(B)/build-with.found holds what a build is made with: the compilers, this machine where
# ARCH=native, the libraries that were found, the flags. Each object depends on it, so that MPI installed later, another
# ARCH or a tree copied to another machine compile anew what they change. -Werror changes no object, and is left out.
# $(call write_changed,FILE,TEXT): writes FILE while the Makefile is read, only where FILE holds something else. FILE is
# not written by `make -n` and `make -q`, but counts as out of date; nor by a `make install` of what is there.
write_changed = $(if $(or $(INSTALLS_BUILD),$(call is_same,$(strip $(2)),$(strip $(file <$(1))))),,$(if $(findstring n,$(SHORT_FLAGS))$(findstring q,$(SHORT_FLAGS)), \
  $(eval .PHONY: $(1)),$(shell mkdir -p $(dir $(1)))$(file >$(1),$(2))))
is_same = $(and $(findstring $(1),$(2)),$(findstring $(2),$(1)))
define BUILD_WITH
$(shell $(CC) --version 2>&1 | head -n 1; $(CC) $(ARCH_FLAGS) -E -v -x c /dev/null 2>&1 >/dev/null | grep -e ' -march=' -e ' -target-cpu ')
$(filter-out -Werror,$(COMPILE)) $(LDFLAGS) $(LDLIBS) $(foreach l,$(LEVELS),$l $(call arch_flags,$l))
$(shell $(CXX) --version 2>&1 | head -n 1)
$(filter-out -Werror,$(EMULATE))
endef
$(call write_changed,$(B)/build-with.found,$(BUILD_WITH))
$(if $(CUDA),$(call write_changed,$(B)/build-with-cuda,$(BUILD_WITH_CUDA)))
$(B)/commit.c $(B)/build-with-cuda $(B)/build-with.found: ;
# $(call check,FLAGS,SOURCE,LIBRARIES,MESSAGE): whether SOURCE can be compiled and linked, before anything else is
# compiled. Where it can't, make ends with MESSAGE, one line that names the way out.
check = @printf '$(2)' >$@.c && $(CC) $(1) $@.c -o $@.program $(3) >/dev/null 2>$@.log || $(call build_fails,$(4))
build_fails = { echo "make: $(1)" >&2; exit 2; }
EMPTY_MAIN := int main(void) { return 0; }\n
$(B)/build-with: $(B)/build-with.found
	$(call check,,$(EMPTY_MAIN),,$(CC) can't build a program ($$(tail -n 1 $@.log)); scripts/setup.sh build installs gcc; CC= names another compiler)
	$(call check,$(ARCH_FLAGS),$(EMPTY_MAIN),,$(CC) does not know ARCH=$(ARCH); ARCH=native is this machine)
	$(call check,-fopenmp,\043include <omp.h>\n$(EMPTY_MAIN),,$(CC) has no OpenMP; install it (clang: libomp-dev) or take gcc by CC=gcc)
	$(if $(MISSING),@$(call build_fails,$(MISSING) not found; scripts/setup.sh build installs what is missing))
	$(if $(MPI_SHOW),$(call check,$(MPI_FLAGS),\043include <mpi.h>\nint main(void) { return MPI_Finalize(); }\n,$(LDFLAGS) $(MPI_LIBS),$(MPI) names \
	  an MPI that no program links with; install it (Debian: libopenmpi-dev) or leave it out by MPI=))
	@rm -f $@.c $@.program $@.log
	@touch $@
