# A part of the Makefile: the instruction sets that the cpu engines are compiled for. Sets ARCH_FLAGS, LEVELS and LEVEL_ROWS.
#
# ARCH=native or a CPU's name is one copy of the engines. A level that has one above it gets a copy for each of those too, and main
# takes the highest whose features this CPU has: one program for a cluster of several kinds of CPU. A row is a level; its name is a
# -march=, on x86-64 with features after a +. AMX needs no level: the engines look for it themselves.
above_x86-64 := x86-64-v3
above_x86-64-v2 := x86-64-v3
above_x86-64-v3 := x86-64-v4
above_x86-64-v4 := x86-64-v4+avx512bf16
above_armv8-a := armv8.2-a+bf16

X86 := $(filter x86_64,$(MACHINE))
# $(call arch_flags,LEVEL): clang knows native as a CPU alone where that is not x86; vectors of 512 bits, where the machine has
# them, are x86's.
arch_flags = $(if $(filter native,$(1)),$(if $(X86),-march=native,-mcpu=native),$(if $(X86),$(call x86_flags,$(subst +, ,$(1))),$(1:%=-march=%))) \
  $(if $(X86),-mprefer-vector-width=512)
x86_flags = $(addprefix -march=,$(firstword $(1))) $(addprefix -m,$(wordlist 2,99,$(1)))
ARCH_FLAGS := $(call arch_flags,$(ARCH))
# The levels above ARCH, less those that an older compiler does not know.
levels_above = $(if $(above_$(1)),$(above_$(1)) $(call levels_above,$(above_$(1))))
is_known = $(shell $(CC) $(call arch_flags,$(1)) -E -x c /dev/null >/dev/null 2>&1 && echo yes)
LEVELS := $(foreach l,$(call levels_above,$(ARCH)),$(if $(call is_known,$l),$l))
# What a level adds to its symbols' and objects' names: _x86_64_v3. Those of ARCH itself have no suffix.
level_suffix = _$(subst +,_,$(subst .,_,$(subst -,_,$(1))))
LEVEL_ROWS := X(,"$(or $(ARCH),any)") $(foreach l,$(LEVELS),X($(call level_suffix,$l),"$l"))
