// The launchers: what csrc/cuda/ops.cpp calls, one for each operator. No torch header: pointers, sizes and a stream.
//
// Unless it says so, a pointer is to device memory. What the host knows (which segments, their tensors, their marks)
// comes in host arrays and goes to the kernels by value, so that nothing is copied and a captured graph holds it.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "../rules.h"
#include "../tiles.h"

namespace fusedaccum::cuda {

struct Device {
  cudaStream_t stream;
  bool wide;  // kernels may have 32,764 bytes of arguments (CUDA 12.1, driver 530, sm_70), else 4,096
};

struct Buffer {
  float* flat;  // a multiple of 16 bytes
  const Tile* tiles;
  const int64_t* first_tile;  // host, count + 1: of each segment, and the number of tiles
  const uint8_t* marks;       // host, count
  uint8_t* live;              // null where every touched segment counts
  int64_t count;              // of segments
};

// What the update rules share. See fusedaccum/ops.py.
struct Update {
  const float* scalars;
  const float* steps;
  const int64_t* groups;
  const double* hyper;
  const int64_t* random;  // null to round to nearest
  bool zero;              // store zeros to flat in the same pass
};

// Whether this device and driver take long argument lists.
bool takes_wide_arguments();

// The GPU architectures that the kernels were compiled for, 900 for sm_90.
std::vector<int> architectures();

// Whether there is code for a device: its own architecture's, or such as the driver can compile for it.
bool runs_on(int device);

// grads: host, count; data is null where there is no gradient. partials: null where no norm is wanted. Marks are read,
// and are the caller's to change.
void fold(const Device& device, const Buffer& buffer, const Elements* grads, const float* scale, double* partials);

void found_inf(const Device& device, const Buffer& buffer, const Elements* grads, float* found_inf);

// total: kTotal elements.
void square_total(const Device& device, const Buffer& buffer, double* partials, double* total);

// marks: host, count. live: null where every touched segment counts.
void close_window(const Device& device, const uint8_t* marks, const uint8_t* live, int64_t count, float* scalars,
                  float* steps, const double* total, const double* divisor, double max_norm, bool skip_nonfinite);

void rescale(const Device& device, const Buffer& buffer, const float* factor);

// grads: host, count.
void emit(const Device& device, const Buffer& buffer, const float* scalars, const Elements* grads);

// lists: params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters; each host, count, data null where there is none.
void adam(const Device& device, const Buffer& buffer, const Update& update, const Elements* const lists[5]);

// lists: params, momentum_buffers, masters.
void sgd(const Device& device, const Buffer& buffer, const Update& update, const Elements* const lists[3]);

}  // namespace fusedaccum::cuda
