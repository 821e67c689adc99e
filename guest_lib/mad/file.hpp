// A descriptor of /dev/infiniband/umad0, as libibumad uses it: <rdma/ib_user_mad.h>. The service knows its agents and keeps what has come
// for them; here is the kernel's form of it. Any thread.
#pragma once

#include "guest_lib/character_files.hpp"

namespace vrdma::guest::mad {

class File final : public CharacterFile {
 public:
  File(std::shared_ptr<Attachment> attachment_in, std::uint32_t channel_in, int fd_in);

  long write(const void* bytes, std::size_t count) override;
  long read(void* bytes, std::size_t count) override;
  int control(unsigned long request, void* argument) override;
  void forgotten() override;

 private:
  std::size_t head_bytes() const;
  Result<long> send(const std::byte* from, std::size_t count);
  Result<long> receive(std::byte* to, std::size_t count);
  Status register_agent(void* argument);
  Status register_agent_2(void* argument);

  std::atomic<bool> knows_pkey_index_{false};  // its program: the head has a field more
  std::atomic<bool> has_agents_{false};        // or had: what the program knows is settled, by the first request it made
  std::mutex reading_;  // what is long is taken piece by piece
};

}  // namespace vrdma::guest::mad
