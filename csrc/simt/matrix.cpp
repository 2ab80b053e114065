#include "simt/matrix.h"

#include <cstring>

#include "common/dtypes.h"

#if GRISTMILL_SIMT_WARP == 32
namespace simt {
namespace {

int lane_of_thread() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % kWarp;
}

// Each lane brings the 16 bytes of the row that it points at.
const Meeting& bring_row(const void* row, const Site& site) {
  check_alignment(row, 16, "a matrix row is loaded", site);
  return meet(Collective::kLoadMatrix, row, 16, site);
}

uint32_t element(const Meeting& meeting, int matrix, int row, int column) {
  uint16_t bits;
  std::memcpy(&bits, meeting.values[8 * matrix + row] + 2 * column, sizeof(bits));
  return bits;
}

// What one lane brings to a product and takes from it. The element type has to be known to `resolve`.
struct Fragments {
  float d[4];
  uint32_t a[4];
  uint32_t b[2];
};
static_assert(sizeof(Fragments) <= Meeting::kBytes);

template <typename T>
float half_of(uint32_t pair, int high) {
  return gristmill::to_float(T{static_cast<uint16_t>(pair >> (16 * high))});
}

// Element pairs: a[0] (g, 2t), a[1] (g + 8, 2t), a[2] (g, 2t + 8), a[3] (g + 8, 2t + 8); b[0] (2t, g), b[1] (2t + 8,
// g).
template <typename T>
void gather(const Fragments* lanes, float (&a)[16][16], float (&b)[16][8]) {
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int high = 0; high < 2; ++high) {
      for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + high] = half_of<T>(lanes[lane].a[i], high);
      for (int i = 0; i < 2; ++i) b[2 * t + 8 * i + high][g] = half_of<T>(lanes[lane].b[i], high);
    }
  }
}

// d[0], d[1] (g, 2t), (g, 2t + 1); d[2], d[3] eight rows below.
template <typename T>
void multiply_all(Meeting& meeting) {
  Fragments lanes[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) std::memcpy(&lanes[lane], meeting.values[lane], sizeof(Fragments));
  float a[16][16], b[16][8];
  double product[16][8] = {};
  gather<T>(lanes, a, b);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) {
        product[row][column] += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
      }
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float& d = lanes[lane].d[i];
      d = static_cast<float>(static_cast<double>(d) + product[g + 8 * (i / 2)][2 * t + i % 2]);
    }
    std::memcpy(meeting.values[lane], &lanes[lane], sizeof(Fragments));
  }
}

}  // namespace

void load_matrix_4(uint32_t (&r)[4], const void* row, const Site& site) {
  const Meeting& meeting = bring_row(row, site);
  const int g = lane_of_thread() / 4, t = lane_of_thread() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = element(meeting, matrix, g, 2 * t) | element(meeting, matrix, g, 2 * t + 1) << 16;
  }
}

void load_matrix_4_transposed(uint32_t (&r)[4], const void* row, const Site& site) {
  const Meeting& meeting = bring_row(row, site);
  const int g = lane_of_thread() / 4, t = lane_of_thread() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = element(meeting, matrix, 2 * t, g) | element(meeting, matrix, 2 * t + 1, g) << 16;
  }
}

void multiply_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half, const Site& site) {
  Fragments mine = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Resolve resolve = half ? &multiply_all<gristmill::Half> : &multiply_all<gristmill::BFloat16>;
  const Meeting& meeting = meet(Collective::kMultiply, &mine, sizeof(mine), site, resolve);
  std::memcpy(&mine, meeting.values[lane_of_thread()], sizeof(mine));
  for (int i = 0; i < 4; ++i) d[i] = mine.d[i];
}

}  // namespace simt
#endif
