# A part of the Makefile: the instruction sets that the cpu engines are compiled for. Sets ARCH_FLAGS, LEVELS and
# LEVEL_ROWS.
#
# ARCH is native, a CPU's name or a level. native and a CPU's name give one copy of the engines. A level gives a copy
# for itself and for each level above it (above_LEVEL), and main takes the highest level whose features this CPU has:
# one program for a cluster of several kinds of CPU. A level's name is an argument of -march=, on x86-64 with features
# after a +. AMX needs no level: the engines look for it at run time.
above_x86-64 := x86-64-v3
above_x86-64-v2 := x86-64-v3
above_x86-64-v3 := x86-64-v4
above_x86-64-v4 := x86-64-v4+avx512bf16
above_armv8-a := armv8.2-a+bf16

X86 := $(filter x86_64,$(MACHINE))
# $(call arch_flags,LEVEL): a level's flags. Outside of x86, clang knows native only as -mcpu. Only x86 has vectors of
# 512 bits, which compilers avoid by default.
arch_flags = $(if $(filter native,$(1)),$(if $(X86),-march=native,-mcpu=native),$(if $(X86),$(call x86_flags,$(subst +, ,$(1))),$(1:%=-march=%))) \
  $(if $(X86),-mprefer-vector-width=512)
x86_flags = $(addprefix -march=,$(firstword $(1))) $(addprefix -m,$(wordlist 2,99,$(1)))
ARCH_FLAGS := $(call arch_flags,$(ARCH))
# LEVELS: the levels above ARCH that the compiler knows.
levels_above = $(if $(above_$(1)),$(above_$(1)) $(call levels_above,$(above_$(1))))
is_known = $(shell $(CC) $(call arch_flags,$(1)) -E -x c /dev/null >/dev/null 2>&1 && echo yes)
LEVELS := $(foreach l,$(call levels_above,$(ARCH)),$(if $(call is_known,$l),$l))
# $(call level_suffix,LEVEL): the end of a level's symbols and objects, as _x86_64_v3. ARCH itself has no suffix.
level_suffix = _$(subst +,_,$(subst .,_,$(subst -,_,$(1))))
LEVEL_ROWS := X(,"$(or $(ARCH),any)") $(foreach l,$(LEVELS),X($(call level_suffix,$l),"$l"))
