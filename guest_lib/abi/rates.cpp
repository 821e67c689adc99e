// enum ibv_rate in multiples of 2.5 Gb/s (the injection rates of IBA 9.11.1) and in Mb/s. One table, read both ways.
#include <infiniband/verbs.h>

#include "guest_lib/abi/export.hpp"

namespace {

struct Rate {
  ibv_rate rate;
  int multiple;  // of 2.5 Gb/s, -1 where libibverbs names none
  int mbps;
};

constexpr Rate rates[] = {
    {IBV_RATE_2_5_GBPS, 1, 2500},      {IBV_RATE_5_GBPS, 2, 5000},       {IBV_RATE_10_GBPS, 4, 10000},
    {IBV_RATE_20_GBPS, 8, 20000},      {IBV_RATE_30_GBPS, 12, 30000},    {IBV_RATE_40_GBPS, 16, 40000},
    {IBV_RATE_60_GBPS, 24, 60000},     {IBV_RATE_80_GBPS, 32, 80000},    {IBV_RATE_120_GBPS, 48, 120000},
    {IBV_RATE_14_GBPS, -1, 14062},     {IBV_RATE_56_GBPS, -1, 56250},    {IBV_RATE_112_GBPS, -1, 112500},
    {IBV_RATE_168_GBPS, -1, 168750},   {IBV_RATE_25_GBPS, -1, 25781},    {IBV_RATE_100_GBPS, -1, 103125},
    {IBV_RATE_200_GBPS, -1, 206250},   {IBV_RATE_300_GBPS, -1, 309375},  {IBV_RATE_28_GBPS, 11, 28125},
    {IBV_RATE_50_GBPS, 20, 53125},     {IBV_RATE_400_GBPS, 160, 425000}, {IBV_RATE_600_GBPS, 240, 637500},
    {IBV_RATE_800_GBPS, 320, 850000},  {IBV_RATE_1200_GBPS, 480, 1275000},
};

template <class Key, class Value>
constexpr Value find(Key Rate::*key, Key wanted, Value Rate::*value, Value otherwise) {
  for (const Rate& row : rates)
    if (row.*key == wanted) return row.*value;
  return otherwise;
}

}  // namespace

VRDMA_EXPORT int ibv_rate_to_mult(ibv_rate rate) { return find(&Rate::rate, rate, &Rate::multiple, -1); }

VRDMA_EXPORT int ibv_rate_to_mbps(ibv_rate rate) { return find(&Rate::rate, rate, &Rate::mbps, -1); }

VRDMA_EXPORT ibv_rate mult_to_ibv_rate(int mult) {
  // -1 marks "no multiple" in the table and must not find a rate.
  return mult < 1 ? IBV_RATE_MAX : find(&Rate::multiple, mult, &Rate::rate, IBV_RATE_MAX);
}

VRDMA_EXPORT ibv_rate mbps_to_ibv_rate(int mbps) {
  return find(&Rate::mbps, mbps, &Rate::rate, IBV_RATE_MAX);
}
