// What nvcc includes before every text, as far as kernels use it, and the headers of C and C++ beside this file.
#pragma once
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
#include <assert.h>
#include <stdint.h>
namespace std {}
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned long ulong;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef HUGE_VALF
#define HUGE_VALF INFINITY
#endif
#define M_PI 3.14159265358979323846
#define M_E 2.7182818284590452354
#define M_SQRT1_2 0.70710678118654752440
#define M_SQRT2 1.41421356237309504880
#define M_2_SQRTPI 1.12837916709551257390
