# A part of the Makefile: the manual page, docs/options.md, completions for bash and zsh, installation, and a package
# for Debian.
PREFIX ?= /usr/local
DESTDIR ?=
# The program that puts the table of options into templates runs here, and so is not made by a cross compiler.
$(call program,write_reference,scripts/install/write_reference.c,$$(COMPILE_BASELINE),,$$(RUNTIME_LDLIBS))
$(REFERENCE): $(B)/reference/%: scripts/install/%.in $(B)/write_reference
	@mkdir -p $(@D)
	$(call quietly,GEN,$(@:$(B)/%=%))$(B)/write_reference $< >$@.new && mv $@.new $@
reference: $(REFERENCE)
docs/options.md: $(REFERENCE) # a page of the repository, to be made anew where the table has changed
	cp $(B)/reference/options.md $@
install: $(if $(INSTALLS_BUILD),,$(if $(wildcard $(B)/train_gpt),,$(B)/train_gpt) reference)
	@scripts/install/install.sh install $(B) '$(DESTDIR)' '$(PREFIX)'
uninstall:
	@scripts/install/install.sh remove $(B) '$(DESTDIR)' '$(PREFIX)'
# The package's engines are for any CPU of this machine's kind, or from ARCH= on, with the system's libraries only.
DEB_ARCH := $(if $(findstring command,$(origin ARCH)),$(ARCH),$(GENERIC_$(MACHINE)))
deb:
	@command -v dpkg-shlibdeps >/dev/null || $(call build_fails,deb needs dpkg-shlibdeps (Debian: dpkg-dev))
	$(SUBMAKE) CUDA= DEPS= SANITIZE= ARCH=$(DEB_ARCH) B=$(B)/deb all
	scripts/install/deb.sh $(B)/deb $(B)
