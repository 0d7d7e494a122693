// Attention's output times the sigmoid of its gate.
#pragma once
#include "kernels/device.cuh" // floatX
#include <sys/cdefs.h>        // __BEGIN_DECLS

__BEGIN_DECLS
// out[i] = att[i] * sigmoid(gate[i]), of n elements.
void attention_gate_forward(floatX *out, const floatX *att, const floatX *gate, int64_t n, struct device *dev);
// datt[i] = dout[i] * sigmoid(gate[i]); dgate[i] = dout[i] * att[i] * sigmoid'(gate[i]). datt may be dout.
void attention_gate_backward(floatX *datt, floatX *dgate, const floatX *dout, const floatX *att, const floatX *gate,
                             int64_t n, struct device *dev);
__END_DECLS
