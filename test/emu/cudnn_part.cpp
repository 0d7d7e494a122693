// Stand-in for each of the libraries that libcudnn.so.9 loads itself, such as libcudnn_graph.so.9. What they would do
// is in test/emu/cudnn.cpp; a test can only remove or damage them.
extern "C" int emu_cudnn_is_the_emulators_part(void) { return 1; }
