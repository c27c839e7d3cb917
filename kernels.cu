/* kernels.cu - mptrain's companion: FP16 tensor-core kernels for convolution, batch normalization,
 * softmax cross entropy, pointwise operators and the optimizer's update.
 *
 * Build:   nvcc -O3 -std=c++17 -c kernels.cu          (any architecture from sm_70 on)
 * Use:     link kernels.o to a program whose mptrain.h was compiled with MPTRAIN_CUDA; the CUDA
 *          backend there calls the mptk_ launchers at the end of this file.
 *
 * Sections, in the order of the file; search for a tag:
 *   >>about      this page, and what each architecture gets
 *   >>tools      vectors of 8, storage types, division by multiplication, reductions
 *   >>mma        tensor cores: wmma, and the faster instructions behind inline wrappers
 *   >>mainloop   a product of two tiles that are fetched from memory while the last is multiplied
 *   >>conv       convolution as a gathering matrix product: fprop, dgrad, wgrad
 *   >>batchnorm  statistics, normalisation, both directions
 *   >>softmax    softmax cross entropy, loss and gradient in one pass
 *   >>pointwise  ReLU, add, pools, dropout, casts, input
 *   >>update     is every gradient finite? the scaler, the optimizer, running statistics
 *   >>launch     what the host calls
 *
 * Letters: activations x[N][H][W][C], filters w[K][R][S][C], outputs y[N][P][Q][K].
 */
#ifndef __CUDACC_RTC__
#include "mptrain.h"
#endif
