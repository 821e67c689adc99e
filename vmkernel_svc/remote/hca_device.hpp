// A physical HCA of this host: one port of one device of the host's libibverbs, with what the carrier needs of it. It knows nothing of
// guests. Used by the shard's thread only; nothing here waits but for the kernel, and for what takes that long there is another thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "vmci_channel/unique_fd.hpp"
#include "vmkernel_svc/config.hpp"
#include "vmkernel_svc/remote/hca_library.hpp"
#include "vmkernel_svc/remote/hca_message.hpp"
#include "vmkernel_svc/remote/hca_registrar.hpp"

namespace vrdma::remote {

// Memory of the service that the HCA reads and writes for guests' memory that it cannot reach.
struct Bounce {
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;
  ibv_mr* mr = nullptr;
};

// One for each protection domain of a guest.
struct HcaDomain {
  ibv_pd* pd = nullptr;
  std::uint32_t users = 0;      // connections and registrations
  std::vector<Bounce> small_bounces, bounces;  // free ones
  std::size_t bounced_bytes = 0;  // of those that are in use
};

// A completion queue, and whether the next completion in it raises an event.
struct HcaCq {
  ibv_cq* cq = nullptr;
  bool armed = false;
  bool polled = false;  // since it was armed it has had a completion, so its event is in the channel, or on the way there, …
  std::uint32_t waited = 0;  // … which was waited for in so many sleeps

  int poll(int count, ibv_wc* completions) {
    const int got = ibv_poll_cq(cq, count, completions);
    polled |= got > 0;
    return got;
  }
};

class HcaDevice {
 public:
  struct Cq : HcaCq {
    std::uint32_t free = 0;  // entries that no queue pair has been promised
  };
  struct QpWish {
    std::uint32_t send_wr, receive_wr, sge, inline_bytes;
  };
  struct SharedReceive {  // an SRQ, and where the messages in it complete
    ibv_srq* srq = nullptr;
    std::unique_ptr<HcaCq> cq;
  };

  // nullptr: there is none, and `why` says so to a person. news: called by another thread, when a registration that takes its time is, or
  // is not.
  static std::unique_ptr<HcaDevice> open(const svc::HcaSettings& wanted, std::function<void()> news, std::string& why);
  ~HcaDevice();
  HcaDevice(const HcaDevice&) = delete;
  HcaDevice& operator=(const HcaDevice&) = delete;

  bool present() const;  // whether the kernel still has it
  const std::string& name() const { return name_; }
  std::uint8_t port() const { return port_; }
  int gid_index() const { return gid_index_; }
  const ibv_gid& gid() const { return gid_; }
  const std::string& gid_type() const { return gid_type_; }
  std::uint8_t mtu() const { return mtu_; }  // enum ibv_mtu: what connections use
  const ibv_port_attr& port_attributes() const { return port_attributes_; }
  const ibv_device_attr& attributes() const { return attributes_; }
  const char* port_state();
  const std::string& flow_control() const { return flow_control_; }  // of its GID's interface, when it was opened: the kernel may take long to say

  HcaDomain* domain(std::uint64_t number);  // nullptr: none can be had
  void release(std::uint64_t number);       // one user less
  ibv_mr* register_memory(HcaDomain& domain, std::byte* memory, std::uint64_t bytes, std::uint64_t iova, int access);
  HcaRegistrar& registrar() { return registrar_; }
  bool deregister(ibv_mr* mr) { return library_.ibv_dereg_mr(mr) == 0; }  // false: the HCA may have it still
  void explain_refusal(std::uint64_t bytes, int error);  // in `refusal`
  static constexpr std::size_t bounce_kept_bytes = 65536;  // those up to here are kept for the next one, and need not be registered again
  bool take_bounce(HcaDomain& domain, std::size_t bytes, Bounce& bounce);  // false: `refusal` says why
  bool make_bounce(HcaDomain& domain, std::size_t bytes, Bounce& bounce);  // likewise; the service's own: bounded and counted by nobody
  void end_bounce(Bounce& bounce) { library_.ibv_dereg_mr(std::exchange(bounce.mr, nullptr)); }  // of make_bounce
  void give_bounce(HcaDomain& domain, Bounce bounce);
  void detach(HcaDomain& domain, Bounce& bounce);  // the HCA has it no more; its memory stays

  // `shared`: it receives there; wish.receive_wr is 0 then.
  ibv_qp* create(HcaDomain& domain, const QpWish& wish, const SharedReceive* shared, Cq*& cq);
  void destroy(ibv_qp* qp, Cq& cq, const QpWish& wish);
  bool create_shared(HcaDomain& domain, std::uint32_t wr, std::uint32_t sge, SharedReceive& made);
  void destroy(SharedReceive& shared);
  void describe(HcaMessage& message) const;  // this end of a connection, to the other one
  void lead_to(const HcaMessage& theirs, ibv_qp_attr& attributes) const;  // IBV_QP_AV, _PATH_MTU and _DEST_QPN, of a modification to RTR
  bool modify(ibv_qp* qp, ibv_qp_attr& attributes, int mask) { return library_.ibv_modify_qp(qp, &attributes, mask) == 0; }
  std::vector<std::unique_ptr<Cq>>& cqs() { return cqs_; }

  // For sleep: descriptors that become readable, and what makes them so. `readable`: the first one is, or was.
  int completion_fd() const { return channel_->fd; }
  int event_fd() const { return context_->async_fd; }
  void arm(bool readable);
  bool next_event(ibv_async_event& event);  // to be acknowledged
  void acknowledge(ibv_async_event& event) { library_.ibv_ack_async_event(&event); }
  const char* explain(ibv_wc_status status) const { return library_.ibv_wc_status_str(status); }
  int error() const { return library_.error(); }

  std::string refusal;  // what was said of the last registration that was refused

 private:
  struct Numbered {
    std::uint64_t number;
    std::unique_ptr<HcaDomain> domain;
  };
  HcaDevice(const HcaLibrary& library, std::function<void()> news) : library_(library), registrar_(library, std::move(news)) {}
  bool choose(const svc::HcaSettings& wanted, std::string& why);
  bool choose_gid(const svc::HcaSettings& wanted, std::string& why);
  void free(HcaDomain& domain);
  bool make(HcaCq& cq, std::uint32_t entries);
  bool take_completion_event();
  template <class Visit>
  bool any_cq(Visit&& visit);  // until one says true

  const HcaLibrary& library_;
  std::string name_, node_;  // node_: what the kernel takes away with the device
  ibv_context* context_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  std::uint8_t port_ = 1;
  std::uint8_t mtu_ = 0;
  int gid_index_ = 0;
  ibv_gid gid_{};
  std::string gid_type_, flow_control_;
  ibv_port_attr port_attributes_{};
  ibv_device_attr attributes_{};
  std::vector<Numbered> domains_;
  std::vector<std::unique_ptr<Cq>> cqs_;
  std::vector<HcaCq*> shared_cqs_;
  std::size_t bounced_bytes_ = 0;
  HcaRegistrar registrar_;
};

}  // namespace vrdma::remote
