// SRQs of the HCA: their receive WQEs, and the messages in them.
#include <algorithm>

#include "vmkernel_svc/remote/far_desk.hpp"
#include "vmkernel_svc/remote/hca_desk.hpp"
#include "vmkernel_svc/shard.hpp"

namespace vrdma::svc {

using engine::QpState;

namespace {
constexpr std::uint32_t srq_wr_max = 4096, srq_sge_max = 32;
constexpr std::uint64_t look_min_ns = 100'000, look_max_ns = 5'000'000;  // as stand-ins do
}  // namespace

// False: the HCA has no such queue to give.
bool HcaDesk::join_shared(HcaConnection& c) {
  MediatedPorts::Srq& srq = *c.qp->srq;
  if (srq.port.hca == nullptr) {
    const SharedReceiveQueue& owner = *srq.port.owner;
    const auto& limits = device_->attributes();
    const std::uint32_t most_sges = std::min(srq_sge_max, static_cast<std::uint32_t>(limits.max_srq_sge));
    if (limits.max_srq <= 0 || limits.max_srq_wr <= 0 || owner.max_sge > most_sges) return false;
    auto made = std::make_unique<HcaShared>();
    made->srq = &srq;
    made->pd = owner.pd->number;
    made->wr = std::clamp(srq.max_wr, 1u, std::min(srq_wr_max, static_cast<std::uint32_t>(limits.max_srq_wr)));
    made->sge = std::min(most_sges, 3 * owner.max_sge);  // buffers may lie in several pieces
    made->domain = device_->domain(made->pd);
    if (made->domain == nullptr) return false;
    if (!device_->create_shared(*made->domain, made->wr, made->sge, made->physical)) return device_->release(made->pd), false;
    srq.port.hca = made.get();
    shared_.push_back(std::move(made));
  }
  c.shared = srq.port.hca;
  return true;
}

// Its physical QP is gone.
void HcaDesk::leave_shared(HcaConnection& c) {
  HcaShared& shared = *std::exchange(c.shared, nullptr);
  if (shared.users.empty()) end_shared(shared);
}

// What no message came for is the next in line again.
void HcaDesk::end_shared(HcaShared& shared) {
  MediatedPorts::Srq& srq = *shared.srq;
  srq.port.hca = nullptr;
  device_->destroy(shared.physical);
  for (auto one = shared.posted.rbegin(); one != shared.posted.rend(); ++one) {
    for (auto& part : one->second.parts) device_->give_bounce(*shared.domain, std::move(part.bounce));
    srq.returned.push_back(one->second.inbound);
  }
  device_->release(shared.pd);
  std::erase_if(shared_, [&](const auto& one) { return one.get() == &shared; });
}

// `shared` is gone afterwards.
void HcaDesk::dissolve(HcaShared& shared, const std::string& why) {
  shared.srq->port.no_hca = why;
  std::vector<HcaConnection*> all;
  for (const auto& [number, c] : shared.users) all.push_back(c);
  for (HcaConnection* const c : all) c->stage == Stage::bound ? lose(*c, why) : go_by_records(*c, why);
}

void HcaDesk::take_back(MediatedPorts::Srq& srq) { dissolve(*srq.port.hca, "its receive queue is shared with queue pairs that do not go by the HCA"); }

bool HcaDesk::pump_shared(HcaShared& shared) {
  const auto takes = [](const auto& user) {
    const Qp& qp = *user.second->qp;
    return user.second->stage == Stage::bound && engine::receives(qp) && !qp.inbound.active && qp.returned.empty();
  };
  const auto found = std::find_if(shared.users.begin(), shared.users.end(), takes);
  if (found == shared.users.end() || shared.awaits_memory) return shared.look_ns = 0, false;
  Qp& taker = *found->second->qp;  // any of them does: what it takes is the SRQ's
  bool worked = false;
  while (shared.posted.size() < shared.wr && engine_.take_receive(taker)) {
    HcaReceive receive;
    receive.inbound = taker.inbound;
    taker.inbound.active = false;
    std::vector<ibv_sge> sges;
    const bool good = lay_out(receive, *shared.domain, sges);
    ibv_recv_wr request{shared.next_number, nullptr, sges.data(), static_cast<int>(sges.size())};
    ibv_recv_wr* bad = nullptr;
    if (!good || sges.size() > shared.sge || ibv_post_srq_recv(shared.physical.srq, &request, &bad) != 0) {
      for (auto& part : receive.parts) device_->give_bounce(*shared.domain, std::move(part.bounce));
      shared.srq->returned.push_back(receive.inbound);
      if (!good && awaited_) return shared.awaits_memory = true, worked;
      dissolve(shared, refused_.empty() ? "a receive buffer has more pieces than the HCA takes in one request" : std::string(refused_));
      return true;
    }
    shared.posted.emplace(shared.next_number++, std::move(receive));
    worked = true;
  }
  if (!shared.posted.empty()) return shared.empty_since_ns = shared.look_ns = 0, worked;
  const std::uint64_t now = vmci::monotonic_ns();
  if (shared.empty_since_ns == 0) shared.empty_since_ns = now;
  shared.look_ns = now + std::clamp((now - shared.empty_since_ns) / 4, look_min_ns, look_max_ns);
  return worked;
}

bool HcaDesk::pump_all_shared() {
  bool worked = false;
  std::vector<HcaShared*> all;
  for (const auto& shared : shared_) all.push_back(shared.get());
  for (HcaShared* const shared : all) worked |= pump_shared(*shared);
  return worked;
}

std::uint64_t HcaDesk::next_wake_ns() const {
  std::uint64_t at = check_ns_;
  for (const auto& shared : shared_)
    if (shared->look_ns != 0) at = std::min(at, shared->look_ns);
  return at;
}

bool HcaDesk::poll_shared(HcaShared& shared) {
  ibv_wc completions[completions_per_look];
  const int count = shared.physical.cq->poll(completions_per_look, completions);
  for (int i = 0; i < count; ++i) {
    const ibv_wc& wc = completions[i];
    const auto found = shared.posted.find(wc.wr_id);
    if (found == shared.posted.end()) continue;
    HcaReceive receive = std::move(found->second);
    shared.posted.erase(found);
    const auto user = shared.users.find(wc.qp_num);
    HcaConnection* const c = user != shared.users.end() ? user->second : nullptr;
    if (c != nullptr) engine_.note_srq_take(*shared.srq);
    if (c != nullptr && wc.status == IBV_WC_SUCCESS) {
      received(*c, std::move(receive), wc);
      continue;
    }
    for (auto& part : receive.parts) device_->give_bounce(*shared.domain, std::move(part.bounce));
    // Its queue pair has begun with it, and uses it first, by records: what is wrong with it, or with the message, is found out there.
    (c != nullptr ? c->qp->returned : shared.srq->returned).push_back(receive.inbound);
    if (c != nullptr && c->stage == Stage::bound && !c->losing && c->qp->state != QpState::err) lose_soon(*c);
  }
  return count > 0;
}

}  // namespace vrdma::svc
