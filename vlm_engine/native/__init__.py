"""CPU kernels in C++ for bfloat16, built with the machine's own compiler on first use.

Where they cannot be had (no AVX-512 with bfloat16, no ``g++``) the engine runs on torch's kernels.
Measured with torch 2.14 on one core of an AMD EPYC (avx512_bf16), two rows: a head of 768 x 151,936 in
7.6 instead of 18 ms; attention of 256 over 4,784 patches, six heads, in 11 instead of 26 ms.
"""
