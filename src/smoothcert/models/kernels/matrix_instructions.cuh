// What the CUDA kernels share: products of 16x8x16 matrices of HALF (float16) or bfloat16, summed in float32, and
// conversions. It goes in front of their sources (`cuda_source`).

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ void store_matrices(u32 address, const u32 (&from)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(address), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
#else
    for (int i = 0; i < 4; i++) {  // the lanes of eight neighbours hold one row of a matrix
        u32 row = __shfl_sync(~0u, address, i * 8 + (threadIdx.x % 32) / 4);
        asm volatile("st.shared.u32 [%0], %1;" :: "r"(row + threadIdx.x % 4 * 4), "r"(from[i]) : "memory");
    }
#endif
}

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ u32 pack_relu(float low, float high) {  // NaN stays
    u32 both;
    asm("cvt.rn.relu." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float number(u16 bits) {
    float value;
#if HALF
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
#else
    value = __uint_as_float((u32)bits << 16);
#endif
    return value;
}

