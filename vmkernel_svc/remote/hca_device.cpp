#include "vmkernel_svc/remote/hca_device.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "vmkernel_svc/remote/flow_control.hpp"

namespace vrdma::remote {

namespace {

constexpr std::uint32_t cq_entries_max = 16384;
// Sizes of which there are free ones: that of a page that the HCA does not reach, and that of a message that it does not.
constexpr std::size_t small_bounce_bytes = 4096;
constexpr std::size_t domain_bounced_max = std::size_t{64} << 20, bounced_max = std::size_t{512} << 20;
constexpr std::size_t bounces_kept = 64;
constexpr std::uint32_t sleeps_for_an_event = 64;

std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// <infiniband/verbs.h> sends calls of this name through an inline function of its own.
int query_port(const HcaLibrary& library, ibv_context* context, std::uint8_t port, ibv_port_attr& attributes) {
  std::memset(&attributes, 0, sizeof(attributes));
  return (library.ibv_query_port)(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
}

void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

std::unique_ptr<HcaDevice> HcaDevice::open(const svc::HcaSettings& wanted, std::function<void()> news, std::string& why) {
  const HcaLibrary* const library = HcaLibrary::load(wanted.library, why);
  if (library == nullptr) return nullptr;
  std::unique_ptr<HcaDevice> device(new HcaDevice(*library, std::move(news)));
  if (!device->choose(wanted, why)) return nullptr;
  device->channel_ = library->ibv_create_comp_channel(device->context_);
  if (device->channel_ == nullptr) {
    why = fmt::format("{} gives no completion channel ({})", device->name_, std::strerror(library->error()));
    return nullptr;
  }
  set_nonblocking(device->channel_->fd);
  set_nonblocking(device->context_->async_fd);
  return device;
}

bool HcaDevice::choose(const svc::HcaSettings& wanted, std::string& why) {
  int count = 0;
  ibv_device** const list = library_.ibv_get_device_list(&count);
  if (list == nullptr || count == 0) {
    if (list != nullptr) library_.ibv_free_device_list(list);
    why = "the kernel has no RDMA device (rdma link shows them; ib_uverbs must be loaded)";
    return false;
  }
  why = wanted.device.empty() ? "no port of an RDMA device is active (rdma link shows them)" : fmt::format("there is no RDMA device {} (rdma link shows them)", wanted.device);
  for (int i = 0; i < count && context_ == nullptr; ++i) {
    if (!wanted.device.empty() && wanted.device != list[i]->name) continue;
    ibv_context* const context = library_.ibv_open_device(list[i]);
    if (context == nullptr) {
      why = fmt::format("{} cannot be opened ({}): vrdmad needs /dev/infiniband/{}", list[i]->name, std::strerror(library_.error()), list[i]->dev_name);
      continue;
    }
    if (library_.ibv_query_device(context, &attributes_) == 0) {
      for (std::uint8_t port = 1; port <= attributes_.phys_port_cnt && context_ == nullptr; ++port) {
        if (wanted.port != 0 && wanted.port != port) continue;
        if (query_port(library_, context, port, port_attributes_) != 0) continue;
        if (port_attributes_.state != IBV_PORT_ACTIVE) {
          why = fmt::format("port {} of {} is not active (rdma link shows its state)", port, list[i]->name);
          continue;
        }
        context_ = context;
        port_ = port;
        mtu_ = static_cast<std::uint8_t>(port_attributes_.active_mtu);
        while (wanted.mtu != 0 && mtu_ > IBV_MTU_256 && 128u << mtu_ > wanted.mtu) --mtu_;
        name_ = list[i]->name;
        node_ = list[i]->dev_path;
        if (!present()) node_.clear();  // not the kernel's: its events tell
      }
    }
    if (context_ == nullptr) library_.ibv_close_device(context);
  }
  library_.ibv_free_device_list(list);
  return context_ != nullptr && choose_gid(wanted, why);
}

// RoCE v2 of an IPv4 address before any other v2, and that before v1: routers take it, and so do firewalls that know UDP.
bool HcaDevice::choose_gid(const svc::HcaSettings& wanted, std::string& why) {
  const bool ethernet = port_attributes_.link_layer == IBV_LINK_LAYER_ETHERNET;
  const std::string folder = fmt::format("/sys/class/infiniband/{}/ports/{}/gid_attrs/", name_, port_);
  int best = -1;
  for (int index = 0; index < port_attributes_.gid_tbl_len; ++index) {
    if (wanted.gid_index >= 0 && wanted.gid_index != index) continue;
    ibv_gid gid{};
    if (library_.ibv_query_gid(context_, port_, index, &gid) != 0 || (gid.global.subnet_prefix == 0 && gid.global.interface_id == 0)) continue;
    const std::string type = line_of(folder + fmt::format("types/{}", index));
    static constexpr unsigned char ipv4[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    const int rank = 1 + 2 * (type == "RoCE v2") + (std::memcmp(gid.raw, ipv4, sizeof(ipv4)) == 0);
    if (rank <= best) continue;
    best = rank;
    gid_index_ = index;
    gid_ = gid;
    gid_type_ = ethernet ? type : "IB";
    if (!ethernet) break;
  }
  flow_control_ = priority_flow_control(line_of(folder + fmt::format("ndevs/{}", gid_index_)));
  if (best < 0) why = wanted.gid_index >= 0 ? fmt::format("{} has no GID {} at port {}", name_, wanted.gid_index, port_) : fmt::format("{} has no GID at port {}: give its interface an address", name_, port_);
  return best >= 0;
}

HcaDevice::~HcaDevice() {
  registrar_.finish();
  for (auto& [number, domain] : domains_) free(*domain);
  for (auto& cq : cqs_) library_.ibv_destroy_cq(cq->cq);
  if (channel_ != nullptr) library_.ibv_destroy_comp_channel(channel_);
  if (context_ != nullptr) library_.ibv_close_device(context_);
}

bool HcaDevice::present() const { return node_.empty() || ::access(node_.c_str(), F_OK) == 0; }

const char* HcaDevice::port_state() {
  static constexpr const char* names[] = {"nop", "down", "init", "armed", "active", "active-defer"};
  ibv_port_attr now;
  if (!present() || query_port(library_, context_, port_, now) != 0) return "gone";
  return now.state < std::size(names) ? names[now.state] : "unknown";
}

// --- protection domains and memory ----------------------------------------------------------------------------

HcaDomain* HcaDevice::domain(std::uint64_t number) {
  const auto known = std::find_if(domains_.begin(), domains_.end(), [&](const Numbered& one) { return one.number == number; });
  if (known != domains_.end()) return ++known->domain->users, known->domain.get();
  auto domain = std::make_unique<HcaDomain>();
  domain->pd = library_.ibv_alloc_pd(context_);
  if (domain->pd == nullptr) return nullptr;
  domain->users = 1;
  domains_.push_back({number, std::move(domain)});
  return domains_.back().domain.get();
}

void HcaDevice::release(std::uint64_t number) {
  const auto known = std::find_if(domains_.begin(), domains_.end(), [&](const Numbered& one) { return one.number == number; });
  if (known == domains_.end() || --known->domain->users != 0) return;
  free(*known->domain);
  domains_.erase(known);
}

void HcaDevice::free(HcaDomain& domain) {
  for (auto* const kept : {&domain.small_bounces, &domain.bounces})
    for (Bounce& bounce : *kept) library_.ibv_dereg_mr(bounce.mr);
  bounced_bytes_ -= domain.bounced_bytes;
  library_.ibv_dealloc_pd(domain.pd);
}

ibv_mr* HcaDevice::register_memory(HcaDomain& domain, std::byte* memory, std::uint64_t bytes, std::uint64_t iova, int access) {
  ibv_mr* const mr = (library_.ibv_reg_mr_iova)(domain.pd, memory, bytes, iova, access);
  if (mr != nullptr) return mr;
  explain_refusal(bytes, library_.error());
  return nullptr;
}

void HcaDevice::explain_refusal(std::uint64_t bytes, int error) {
  refusal = fmt::format("{} does not register {} bytes ({})", name_, bytes, std::strerror(error));
  if (error == ENOMEM) refusal += ": LimitMEMLOCK of vrdmad?";
}

bool HcaDevice::take_bounce(HcaDomain& domain, std::size_t bytes, Bounce& bounce) {
  const std::size_t size = bytes <= small_bounce_bytes ? small_bounce_bytes : std::max(bytes, std::size_t{bounce_kept_bytes});
  if (domain.bounced_bytes + size > domain_bounced_max || bounced_bytes_ + size > bounced_max) {
    refusal = fmt::format("buffers that {} does not reach would take {} MiB of vrdmad's memory and more", name_,
                          (domain.bounced_bytes + size > domain_bounced_max ? domain_bounced_max : bounced_max) >> 20);
    return false;
  }
  auto& kept = size == small_bounce_bytes ? domain.small_bounces : domain.bounces;
  if (size <= bounce_kept_bytes && !kept.empty()) {
    bounce = std::move(kept.back());
    kept.pop_back();
  } else if (!make_bounce(domain, size, bounce)) {
    return false;
  }
  domain.bounced_bytes += size;
  bounced_bytes_ += size;
  return true;
}

bool HcaDevice::make_bounce(HcaDomain& domain, std::size_t bytes, Bounce& bounce) {
  bounce.bytes = bytes;
  bounce.memory.reset(new (std::nothrow) std::byte[bytes]);
  if (!bounce.memory) return refusal = "no memory", false;
  bounce.mr = register_memory(domain, bounce.memory.get(), bytes, static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(bounce.memory.get())), IBV_ACCESS_LOCAL_WRITE);
  return bounce.mr != nullptr;
}

void HcaDevice::give_bounce(HcaDomain& domain, Bounce bounce) {
  auto& kept = bounce.bytes == small_bounce_bytes ? domain.small_bounces : domain.bounces;
  if (bounce.bytes > bounce_kept_bytes || kept.size() >= bounces_kept) return detach(domain, bounce);
  domain.bounced_bytes -= bounce.bytes;
  bounced_bytes_ -= bounce.bytes;
  kept.push_back(std::move(bounce));
}

void HcaDevice::detach(HcaDomain& domain, Bounce& bounce) {
  domain.bounced_bytes -= bounce.bytes;
  bounced_bytes_ -= bounce.bytes;
  library_.ibv_dereg_mr(std::exchange(bounce.mr, nullptr));
}

// --- queue pairs ----------------------------------------------------------------------------------------------

bool HcaDevice::make(HcaCq& cq, std::uint32_t entries) {
  cq.cq = library_.ibv_create_cq(context_, static_cast<int>(entries), &cq, channel_, 0);
  return cq.cq != nullptr;
}

ibv_qp* HcaDevice::create(HcaDomain& domain, const QpWish& wish, const SharedReceive* shared, Cq*& cq) {
  const std::uint32_t entries = wish.send_wr + wish.receive_wr;
  cq = nullptr;
  for (auto& one : cqs_)
    if (one->free >= entries) cq = one.get();
  if (cq == nullptr) {
    const auto size = std::min<std::uint32_t>(cq_entries_max, static_cast<std::uint32_t>(attributes_.max_cqe));
    if (size < entries) return nullptr;
    auto made = std::make_unique<Cq>();
    if (!make(*made, size)) return nullptr;
    made->free = size;
    cqs_.push_back(std::move(made));
    cq = cqs_.back().get();
  }
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq->cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.sq_sig_all = 1;
  wanted.cap = {wish.send_wr, wish.receive_wr, wish.sge, wish.sge, wish.inline_bytes};
  if (shared != nullptr) wanted.srq = shared->srq, wanted.recv_cq = shared->cq->cq, wanted.cap.max_recv_sge = 0;
  ibv_qp* const qp = library_.ibv_create_qp(domain.pd, &wanted);
  if (qp != nullptr) cq->free -= entries;
  return qp;
}

void HcaDevice::destroy(ibv_qp* qp, Cq& cq, const QpWish& wish) {
  if (library_.ibv_destroy_qp(qp) != 0) return;  // the device keeps it, and its entries
  cq.free += wish.send_wr + wish.receive_wr;
}

bool HcaDevice::create_shared(HcaDomain& domain, std::uint32_t wr, std::uint32_t sge, SharedReceive& made) {
  ibv_srq_init_attr wanted{};
  wanted.attr = {wr, sge, 0};
  made.srq = library_.ibv_create_srq(domain.pd, &wanted);
  if (made.srq == nullptr) return false;
  made.cq = std::make_unique<HcaCq>();
  if (!make(*made.cq, wr)) return library_.ibv_destroy_srq(made.srq), false;
  shared_cqs_.push_back(made.cq.get());
  return true;
}

void HcaDevice::destroy(SharedReceive& shared) {
  std::erase(shared_cqs_, shared.cq.get());
  library_.ibv_destroy_srq(shared.srq);
  if (library_.ibv_destroy_cq(shared.cq->cq) != 0) (void)shared.cq.release();  // the device keeps it, and may name it in an event
}

void HcaDevice::describe(HcaMessage& message) const {
  message.link_layer = port_attributes_.link_layer;
  message.lid = port_attributes_.lid;
  message.mtu = mtu_;
  std::memcpy(message.gid, gid_.raw, sizeof(message.gid));
}

void HcaDevice::lead_to(const HcaMessage& theirs, ibv_qp_attr& a) const {
  a.path_mtu = static_cast<ibv_mtu>(std::clamp<int>(std::min(mtu_, theirs.mtu), 1, 5));
  a.dest_qp_num = theirs.qpn;
  a.ah_attr.port_num = port_;
  a.ah_attr.dlid = theirs.lid;
  if (theirs.link_layer != IBV_LINK_LAYER_ETHERNET) return;
  a.ah_attr.is_global = 1;
  std::memcpy(a.ah_attr.grh.dgid.raw, theirs.gid, sizeof(theirs.gid));
  a.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index_);
  a.ah_attr.grh.hop_limit = 64;
}

// --- events ---------------------------------------------------------------------------------------------------

template <class Visit>
bool HcaDevice::any_cq(Visit&& visit) {
  return std::any_of(cqs_.begin(), cqs_.end(), [&](auto& cq) { return visit(*cq); }) ||
         std::any_of(shared_cqs_.begin(), shared_cqs_.end(), [&](HcaCq* cq) { return visit(*cq); });
}

// What is armed stays so until its next completion, and there is one event for it then: so of the system calls here only those are
// made that something has happened for. An event may come later than its completion was polled; it is taken at the next sleep then.
void HcaDevice::arm(bool readable) {
  if (readable || any_cq([](const HcaCq& cq) { return cq.armed && cq.polled; }))
    while (any_cq([](const HcaCq& cq) { return cq.armed; }) && take_completion_event()) {
    }
  any_cq([](HcaCq& cq) {
    // The kernel drops an event that it has no memory for. Arming once more than needed does no harm.
    if (cq.armed && cq.polled && ++cq.waited == sleeps_for_an_event) cq.armed = false;
    if (!cq.armed) cq.armed = ibv_req_notify_cq(cq.cq, 0) == 0, cq.polled = false, cq.waited = 0;
    return false;
  });
}

bool HcaDevice::take_completion_event() {
  ibv_cq* cq;
  void* context;
  if (library_.ibv_get_cq_event(channel_, &cq, &context) != 0) return false;
  static_cast<HcaCq*>(context)->armed = false;
  library_.ibv_ack_cq_events(cq, 1);
  return true;
}

bool HcaDevice::next_event(ibv_async_event& event) { return library_.ibv_get_async_event(context_, &event) == 0; }

}  // namespace vrdma::remote
