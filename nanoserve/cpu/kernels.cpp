// The operations of ops.py for a CPU with AVX512-BF16: bfloat16 numbers, float32 sums, memory read once.
//
// Knows pointers, strides and threads. Refuses to know models, requests and Python: `nanoserve_run` executes a list of
// operations, each a kind, pointers and numbers, with a barrier between two of them; native.py writes the list.

#include <omp.h>
#include <sched.h>

#include <atomic>

#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace {

using Kernel = void (*)(const Op&, Team);
const Kernel KERNELS[] = {linear, embed, rms_norm, angles, rotate, gate, store, attend, pack<bf16>, pack<int8_t>,
                          layer_norm, gelu, add};

// Wait until all threads are here. OpenMP's own barrier goes on spinning when a thread has lost its core to somebody.
struct Barrier {
  std::atomic<int64_t> arrived{0}, rounds{0};

  void wait(int64_t num_threads) {
    const int64_t round = rounds.load(std::memory_order_acquire);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived.store(0, std::memory_order_relaxed);
      rounds.fetch_add(1, std::memory_order_release);
    }
    for (int64_t spins = 0; rounds.load(std::memory_order_acquire) == round; spins++)
      spins < 4096 ? _mm_pause() : void(sched_yield());
  }
};

}  // namespace

extern "C" void nanoserve_run(const Op* ops, int64_t count, int64_t num_threads) {
  Barrier barrier;
#pragma omp parallel num_threads(num_threads)
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads()};
    for (int64_t i = 0; i < count; i++) {
      KERNELS[ops[i].kind](ops[i], team);
      if (i + 1 < count) barrier.wait(team.num_threads);
    }
  }
}
