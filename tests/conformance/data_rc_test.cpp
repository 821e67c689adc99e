// RC data: every opcode over every length, cut into random SGEs in an arena whose every byte is predicted by a model.
#include <algorithm>
#include <cstring>

#include "tests/conformance/verbs.hpp"

namespace vrdma::conformance {
namespace {

constexpr std::size_t largest = 1 << 20;
constexpr std::size_t data_arena_bytes = largest + 256 * 1024;

std::vector<std::size_t> lengths(Rng& rng, std::size_t mtu) {
  std::vector<std::size_t> out{0,       1,       7,    8,        9,        63,      64,         65,
                               mtu - 1, mtu,     mtu + 1, 2 * mtu, 4095,   4096,    4097,       65535,
                               65536,   65537,   largest - 1, largest};
  for (int i = 0; i < 12; ++i) out.push_back(rng.below(i < 6 ? 5000 : largest));
  return out;
}

// A message cut into pieces that lie apart in an arena, in random order.
struct Scatter {
  struct Piece {
    std::size_t offset;
    std::size_t bytes;
  };
  std::vector<Piece> pieces;

  static Scatter plan(Rng& rng, std::size_t bytes, std::size_t max_pieces) {
    Scatter out;
    if (bytes == 0) return out;
    const std::size_t count = std::min(bytes, rng.between(1, max_pieces));
    std::vector<std::size_t> cuts{0, bytes};
    while (cuts.size() < count + 1) {
      const std::size_t cut = rng.between(1, bytes - 1);
      if (std::find(cuts.begin(), cuts.end(), cut) == cuts.end()) cuts.push_back(cut);
    }
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    for (std::size_t i = count; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
    out.pieces.resize(count);
    const std::size_t spare = (data_arena_bytes - bytes) / (count + 1);
    std::size_t at = 0;
    for (const std::size_t i : order) {
      at += rng.between(1, std::max<std::size_t>(1, std::min<std::size_t>(spare - 1, 3000)));
      out.pieces[i] = {at, cuts[i + 1] - cuts[i]};
      at += out.pieces[i].bytes;
    }
    return out;
  }
  std::vector<ibv_sge> sges(const Region& region) const {
    std::vector<ibv_sge> out;
    for (const Piece& p : pieces) out.push_back(region.sge(p.offset, p.bytes));
    return out;
  }
  std::vector<std::byte> gather(std::span<const std::byte> arena) const {
    std::vector<std::byte> out;
    for (const Piece& p : pieces) {
      const auto piece = arena.subspan(p.offset, p.bytes);
      out.insert(out.end(), piece.begin(), piece.end());
    }
    return out;
  }
  void scatter(std::span<const std::byte> message, std::span<std::byte> arena) const {
    std::size_t at = 0;
    for (const Piece& p : pieces) {
      std::memcpy(arena.data() + p.offset, message.data() + at, p.bytes);
      at += p.bytes;
    }
  }
};

std::uint32_t most_sges(const Device& dev) { return static_cast<std::uint32_t>(std::min({dev.attr.max_sge, dev.attr.max_sge_rd, 30})); }

LinkSpec data_spec(Run& run, ibv_qp_type type) {
  Device dev(run.settings);
  LinkSpec spec;
  spec.qp.type = type;
  spec.qp.send_sge = most_sges(dev);
  spec.qp.recv_sge = most_sges(dev);
  spec.qp.inline_bytes = 64;
  spec.bytes = data_arena_bytes;
  return spec;
}

// Both roles hold the sender's and the receiver's arena as a model; each compares its own memory with it after each message.
void move_everything(Run& run, Link& link, std::span<const ibv_wr_opcode> opcodes, int plans) {
  std::vector<std::byte> model_a(data_arena_bytes);
  std::vector<std::byte> model_b(data_arena_bytes);
  fill_pattern(model_a, run.seed);
  fill_pattern(model_b, run.seed + 1);
  std::memcpy(link.mem.data(), (run.a() ? model_a : model_b).data(), data_arena_bytes);
  run.peer.barrier();
  const std::size_t max_pieces = std::min(link.qp.cap.max_send_sge, link.qp.cap.max_recv_sge);
  const std::size_t pieces_limit = std::min<std::size_t>(run.peer.exchange(max_pieces), std::min<std::size_t>(max_pieces, 30));
  const std::size_t inline_limit = std::min<std::size_t>(run.peer.exchange(link.qp.cap.max_inline_data), link.qp.cap.max_inline_data);
  std::uint64_t id = 0;
  for (const ibv_wr_opcode opcode : opcodes) {
    for (const std::size_t bytes : lengths(run.rng, link.dev.mtu_bytes())) {
      for (int round = 0; round < plans; ++round) {
        ++id;
        const Scatter at_a = Scatter::plan(run.rng, bytes, round == 0 ? 1 : pieces_limit);
        const Scatter at_b = Scatter::plan(run.rng, bytes, round == 0 ? 1 : pieces_limit);
        const std::size_t remote_offset = run.rng.below(data_arena_bytes - bytes);
        const bool use_inline = bytes <= inline_limit && opcode != IBV_WR_RDMA_READ && run.rng.one_in(2);
        const auto imm = static_cast<std::uint32_t>(run.rng.next());
        const Note note("opcode ", opcode, " bytes ", bytes, " SGEs ", at_a.pieces.size(), " to ", at_b.pieces.size(),
                        use_inline ? " inline" : "");
        const bool is_send = opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
        const bool has_imm = opcode == IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        if (run.b() && (is_send || has_imm)) EXPECT_OK(post(link.qp, Recv{id, is_send ? at_b.sges(link.mem) : std::vector<ibv_sge>{}}));
        run.peer.barrier();
        if (run.a()) {
          Send send{.opcode = opcode,
                    .id = id,
                    .sges = at_a.sges(link.mem),
                    .flags = static_cast<unsigned>(IBV_SEND_SIGNALED) | (use_inline ? static_cast<unsigned>(IBV_SEND_INLINE) : 0u),
                    .imm = imm,
                    .remote_address = link.remote.address + remote_offset,
                    .rkey = link.remote.rkey};
          EXPECT_OK(post(link.qp, send));
          const ibv_wc wc = link.scq.expect(id);
          EXPECT_EQ(wc.opcode, is_send ? IBV_WC_SEND : opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
          EXPECT_EQ(wc.qp_num, link.qp.p->qp_num);
          if (opcode == IBV_WR_RDMA_READ) EXPECT_EQ(wc.byte_len, bytes);
        } else if (is_send || has_imm) {
          const ibv_wc wc = link.rcq.expect(id);
          EXPECT_EQ(wc.opcode, is_send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM);
          EXPECT_EQ(wc.byte_len, bytes);
          EXPECT_EQ(wc.qp_num, link.qp.p->qp_num);
          EXPECT_EQ((wc.wc_flags & IBV_WC_WITH_IMM) != 0, has_imm);
          if (has_imm) EXPECT_EQ(wc.imm_data, imm);
        }
        run.peer.barrier();
        if (opcode == IBV_WR_RDMA_READ) {
          at_a.scatter(std::span(model_b).subspan(remote_offset, bytes), model_a);
        } else {
          const std::vector<std::byte> message = at_a.gather(model_a);
          if (is_send) {
            at_b.scatter(message, model_b);
          } else if (bytes) {
            std::memcpy(model_b.data() + remote_offset, message.data(), bytes);
          }
        }
        expect_bytes(link.mem.buffer.span(), run.a() ? model_a : model_b, "the arena");
      }
    }
  }
  link.scq.expect_empty();
  link.rcq.expect_empty();
  run.peer.barrier();
}

}  // namespace

CONFORMANCE(RcSendMovesExactlyTheRightBytes, "WR-15 WR-17 WC-01 WC-03", .timeout_s = 120) {
  Link link(run, data_spec(run, IBV_QPT_RC));
  constexpr ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM};
  move_everything(run, link, opcodes, 3);
}
CONFORMANCE(RcWriteMovesExactlyTheRightBytes, "WR-15 WR-17 WC-01 WC-03 WC-04", .timeout_s = 120) {
  Link link(run, data_spec(run, IBV_QPT_RC));
  constexpr ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM};
  move_everything(run, link, opcodes, 3);
}
CONFORMANCE(RcReadMovesExactlyTheRightBytes, "WR-15 WR-17 WC-01", .timeout_s = 120) {
  Link link(run, data_spec(run, IBV_QPT_RC));
  constexpr ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_READ};
  move_everything(run, link, opcodes, 3);
}
CONFORMANCE(UcMovesExactlyTheRightBytes, "UC-01 WC-03 WC-04", .timeout_s = 120) {
  Link link(run, data_spec(run, IBV_QPT_UC));
  constexpr ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE_WITH_IMM};
  move_everything(run, link, opcodes, 2);
}

CONFORMANCE(EveryPathMtuCarriesItsMultiples, "MTU-01", .timeout_s = 120) {
  for (int mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; ++mtu) {
    Device probe(run.settings);
    if (mtu > probe.port.active_mtu) break;
    const Note note("path MTU ", 128 << mtu);
    LinkSpec spec;
    spec.path.mtu = mtu;
    spec.bytes = 128 * 1024;
    Link link(run, spec);
    const std::size_t unit = std::size_t{128} << mtu;
    std::uint64_t id = 0;
    for (const std::size_t multiple : {1u, 2u, 3u, 7u, 11u}) {
      for (const int delta : {-1, 0, 1}) {
        const std::size_t bytes = unit * multiple + static_cast<std::size_t>(delta);
        const Note inner("bytes ", bytes);
        ++id;
        std::vector<std::byte> wanted(bytes);
        fill_pattern(wanted, run.seed + id);
        if (run.b()) EXPECT_OK(post(link.qp, link.recv(id, 64 * 1024, bytes)));
        run.peer.barrier();
        if (run.a()) {
          std::memcpy(link.mem.data(), wanted.data(), bytes);
          EXPECT_OK(post(link.qp, link.write(1, 0, 0, bytes)));
          link.scq.expect(1);
          EXPECT_OK(post(link.qp, link.send(2, 0, bytes)));
          link.scq.expect(2);
          EXPECT_OK(post(link.qp, link.read(3, 64 * 1024, 0, bytes)));
          link.scq.expect(3);
          expect_bytes({link.mem.data(64 * 1024), bytes}, wanted, "read");
        } else {
          EXPECT_EQ(link.rcq.expect(id).byte_len, bytes);
          expect_bytes({link.mem.data(64 * 1024), bytes}, wanted, "sent");
        }
        run.peer.barrier();
        if (run.b()) expect_bytes({link.mem.data(), bytes}, wanted, "written");
        run.peer.barrier();
      }
    }
  }
}

CONFORMANCE(MoreReadsThanMaxRdAtomicAllComplete, "WR-18") {
  for (const std::uint8_t limit : {std::uint8_t{1}, std::uint8_t{2}}) {
    LinkSpec spec;
    spec.path.rd_atomic = limit;
    spec.path.dest_rd_atomic = limit;
    Link link(run, spec);
    if (run.b()) fill_pattern(link.mem.buffer.span(), run.seed);
    run.peer.barrier();
    if (run.a()) {
      std::vector<std::byte> wanted(link.mem.buffer.size());
      fill_pattern(wanted, run.seed);
      constexpr std::size_t bytes = 1000;
      for (std::uint64_t i = 0; i < 60; ++i) EXPECT_OK(post(link.qp, link.read(i, i * bytes, i * bytes, bytes)));
      for (std::uint64_t i = 0; i < 60; ++i) link.scq.expect(i);
      expect_bytes({link.mem.data(), 60 * bytes}, std::span(wanted).first(60 * bytes), "60 reads");
    }
    run.peer.barrier();
  }
}

}  // namespace vrdma::conformance
