// Stand-in for each of the libraries that libcudnn.so.9 loads itself: libcudnn_graph.so.9 and its like. All that they
// have is in test/emu/cudnn.cpp; whether they are there and can be loaded is what a test can change.
extern "C" int emu_cudnn_is_the_emulators_part(void) { return 1; }
