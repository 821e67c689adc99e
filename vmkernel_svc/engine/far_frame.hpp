// A record and its payload in one piece of memory, with room in front for what the carrier puts there: bytes are gathered into it
// once, and scattered from it once. Belongs to one thread at a time.
#pragma once

#include <cstring>
#include <memory>
#include <new>

#include "vmkernel_svc/engine/far_record.hpp"

namespace vrdma::engine {

class FarFrame {
 public:
  static constexpr std::size_t carrier_bytes = 128;

  struct Deleter {
    void operator()(FarFrame* frame) const { ::operator delete(frame, std::align_val_t{64}); }
  };
  using Pointer = std::unique_ptr<FarFrame, Deleter>;

  // payload_capacity: how much may follow the record.
  static Pointer make(std::uint32_t payload_capacity) {
    void* const memory = ::operator new(sizeof(FarFrame) + carrier_bytes + sizeof(FarRecord) + payload_capacity, std::align_val_t{64});
    return Pointer(new (memory) FarFrame(payload_capacity));
  }

  std::byte* whole() { return reinterpret_cast<std::byte*>(this + 1); }  // the carrier's bytes, the record, the payload
  FarRecord& record() { return *reinterpret_cast<FarRecord*>(whole() + carrier_bytes); }
  std::byte* payload() { return whole() + carrier_bytes + sizeof(FarRecord); }
  std::uint32_t capacity() const { return capacity_; }
  std::size_t whole_bytes() { return carrier_bytes + sizeof(FarRecord) + record().payload_bytes; }

  std::uint32_t host = 0;     // where it goes to or comes from
  std::uint64_t session = 0;  // of that host's service: a record is for no other

 private:
  explicit FarFrame(std::uint32_t capacity) : capacity_(capacity) { std::memset(whole(), 0, carrier_bytes + sizeof(FarRecord)); }
  std::uint32_t capacity_;
};
using FarFramePtr = FarFrame::Pointer;

}  // namespace vrdma::engine
