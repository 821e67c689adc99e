// From the service to the process: replies with the descriptors that belong to them, and streams.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "guest_agent/connection.hpp"
#include "guest_agent/log.hpp"
#include "vmci_channel/sleep_word.hpp"
#include "vrdma/copy_ring.hpp"

namespace vrdma::agent {

using control::Head;
using control::Request;
using vmci::UniqueFd;

bool Connection::take_reply(const vm::FrameHead& frame, std::span<const std::byte> packet) {
  Head head{};
  if (packet.size() < sizeof(head) || packet.size() > sizeof(head) + control::body_bytes_max) return false;
  std::memcpy(&head, packet.data(), sizeof(head));
  if (frame.flags > vmci::packet_descriptors_max / 2 || frame.item > item_streams - vmci::packet_descriptors_max) return false;
  auto asked = outstanding_.extract(head.sequence);
  if (asked.empty()) return false;
  const Request request = asked.mapped().request;
  const bool good = head.status == 0;

  std::vector<std::byte> answer(packet.begin(), packet.end());
  // What the service now knows counts whether the process is still there or not.
  if (request == Request::add_pinned && good) {
    control::AddBackingReply added{};
    if (packet.size() < sizeof(head) + sizeof(added)) return false;
    std::memcpy(&added, packet.data() + sizeof(head), sizeof(added));
    if (auto& lent = asked.mapped().lent) {
      added.page = static_cast<std::uint32_t>(lent.offset() / vm::page_bytes);
      std::memcpy(answer.data() + sizeof(head), &added, sizeof(added));
      lent_[added.backing] = std::move(lent);
    } else {
      rings_[added.backing] = std::move(asked.mapped().ring);
    }
  }
  if (request == Request::remove_backing && good) {
    rings_.erase(asked.mapped().backing);
    if (auto lent = lent_.extract(asked.mapped().backing)) session_.bar_ever()->give_back(std::move(lent.mapped()), folder_.get());
  }
  if (!connected()) return true;

  std::vector<int> descriptors;
  std::vector<UniqueFd> pipes;
  bool copies = false;
  if (request == Request::attach && good && !attach_reply(std::span(answer).subspan(sizeof(head)), descriptors, pipes)) return false;
  if (request == Request::reach_process && good) {
    control::ReachProcessReply reached{};
    if (packet.size() < sizeof(head) + sizeof(reached)) return false;
    std::memcpy(&reached, packet.data() + sizeof(head), sizeof(reached));
    copies = reached.way == control::reach_by_guest;
    if (copies && !copier_reply(descriptors, pipes)) copies = false, descriptors.push_back(-1);
  }
  if (request == Request::show && good && frame.flags == 1) {
    UniqueFd file(::memfd_create("vrdma-show", MFD_CLOEXEC));
    if (file && documents_.size() < vmci::packet_descriptors_max) {
      documents_.emplace(frame.item, Document{std::move(answer), std::move(file)});
      return true;
    }
    ::shutdown(socket_.fd(), SHUT_RDWR);
    return true;
  }
  bool served = descriptors.empty() || descriptors.back() >= 0;
  for (std::uint32_t i = 0; i < frame.flags && served; ++i) {
    if (copies) {
      copier_streams_.insert(frame.item + i);
      continue;
    }
    auto pipe = open_stream(frame.item + i, request == Request::attach ? Stream::Use::wake : Stream::Use::events);
    if (!pipe) {
      served = false;
      break;
    }
    pipes.push_back(std::move(*pipe));
    descriptors.push_back(pipes.back().get());
  }
  UniqueFd interrupt = std::move(asked.mapped().interrupt);
  control::ChannelReply channel{};
  if (request == Request::create_channel && good && packet.size() >= sizeof(head) + sizeof(channel))
    std::memcpy(&channel, packet.data() + sizeof(head), sizeof(channel));
  if (served && channel.ring != 0 && interrupt && pipes.size() == 1) {
    vectors_.insert_or_assign(frame.item, std::move(asked.mapped().vector));
    descriptors.push_back(interrupt.get());
  }
  // Without them, or if it does not take its replies, it would wait for ever.
  if (!served) say("process %d is not served any more (no descriptor can be made): raise the limit of open files", credentials_.pid);
  if (!served || !socket_.send(answer, descriptors)) ::shutdown(socket_.fd(), SHUT_RDWR);
  return true;
}

bool Connection::attach_reply(std::span<std::byte> body, std::vector<int>& descriptors, std::vector<UniqueFd>& made) {
  control::AttachReply reply{};
  if (body.size() < sizeof(reply) || attached_) return false;
  std::memcpy(&reply, body.data(), sizeof(reply));
  if (reply.arena_bytes > (lent_arena_ ? lent_arena_.bytes() : arena_.memory.bytes())) return false;
  reply.flags |= control::attach_in_machine;
  if (lent_arena_) reply.flags |= control::attach_in_bar;
  reply.service_pid = 0;
  std::memcpy(body.data(), &reply, sizeof(reply));
  attached_ = true;
  const Device& device = session_.device();
  const bool by_kernel = device.doorbell >= 0 && !device.service_polls();
  if (!by_kernel) doorbell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (doorbell_ && !watch_.events.add(doorbell_.get(), EPOLLIN, {number_, item_doorbell})) doorbell_.reset();
  int arena = arena_.memory.fd(), page = session_.page_fd();
  if (lent_arena_) {
    auto fd = session_.bar()->descriptor(lent_arena_, vmci::Writable::yes);
    if (fd) made.push_back(std::move(*fd));
    arena = fd ? made.back().get() : -1;
  }
  descriptors = {arena, page, by_kernel ? device.doorbell : doorbell_.get()};
  if (arena < 0) descriptors.back() = -1;  // it is not served then
  return true;
}

bool Connection::copier_reply(std::vector<int>& descriptors, std::vector<UniqueFd>& made) {
  if (!lent_copier_) {
    descriptors.push_back(copier_.memory.fd());
    return true;
  }
  auto fd = session_.bar()->descriptor(lent_copier_, vmci::Writable::yes);
  if (!fd) return false;
  made.push_back(std::move(*fd));
  descriptors.push_back(made.back().get());
  descriptors.push_back(copier_word_.fd());
  return true;
}

Result<UniqueFd> Connection::open_stream(std::uint32_t item, Stream::Use use) {
  UniqueFd read_end;
  auto stream = Stream::make(use, read_end);
  if (!stream) return stream.error();
  if (!streams_.emplace(item, std::move(*stream)).second) return Errno{EEXIST};
  return read_end;
}

bool Connection::take_stream(std::uint32_t item, std::span<const std::byte> bytes) {
  if (!connected()) return true;
  if (copier_streams_.contains(item)) {
    // The service has changed the word; the thread sleeps on it in this machine, or on one that is ours to change.
    std::uint32_t* word = lent_copier_ ? copier_word_.at<std::uint32_t>(0) : &copier_.memory.at<copying::Header>(0)->service.news;
    if (lent_copier_) std::atomic_ref(*word).fetch_add(1, std::memory_order_release);  // pairs with the acquire in Copier::sleep
    vmci::wake_word(word);
    return true;
  }
  if (const auto document = documents_.find(item); document != documents_.end()) {
    // What finds no memory is missing at the end, and is no JSON then.
    [[maybe_unused]] const auto written = ::write(document->second.file.get(), bytes.data(), bytes.size());
    return true;
  }
  const auto found = streams_.find(item);
  if (found == streams_.end()) return true;  // closed since
  found->second.put(bytes);
  watch(item, found->second);
  return true;
}

bool Connection::take_stream_end(std::uint32_t item) {
  copier_streams_.erase(item);
  if (auto whole = documents_.extract(item)) {
    const int file = whole.mapped().file.get();
    if (connected() && !socket_.send(whole.mapped().reply, std::span(&file, 1))) ::shutdown(socket_.fd(), SHUT_RDWR);
    return true;
  }
  const auto found = streams_.find(item);
  if (found == streams_.end()) return true;
  found->second.end();
  if (found->second.over()) close_stream(found);
  return true;
}

// While it holds something back, room in its pipe is waited for.
void Connection::watch(std::uint32_t item, Stream& stream) {
  if (stream.holds() == stream.watched) return;
  if (stream.holds())
    stream.watched = watch_.events.add(stream.fd(), EPOLLOUT, {number_, item_streams | item}).has_value();
  else
    watch_.events.remove(stream.fd()), stream.watched = false;
}

void Connection::close_stream(std::map<std::uint32_t, Stream>::iterator stream) {
  if (stream->second.watched) watch_.events.remove(stream->second.fd());
  vectors_.erase(stream->first);
  streams_.erase(stream);
}

}  // namespace vrdma::agent
