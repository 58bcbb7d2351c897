// Gradients that are summed while a pass goes back, against their sum afterwards: the same bits,
// since ranks that are threads add in one order.

#include "torch/early_sums.h"

#include <gtest/gtest.h>

#include "torch/torch_decoder_test_support.h"
#include "torch/torch_ranks_test_support.h"
#include "torch/trunk.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::any_gradient;
using testing::HostGroup;
using testing::kFamilies;
using testing::offsets_of;
using testing::random_parameters;
using testing::random_tokens;

// The gradients of a rank's pass, whose tokens are its own; rank 1 has none.
Tensor gradients_of_rank(const TorchDecoder& decoder, int rank, const Tensor& flat,
                         PassPieces* pieces) {
  const std::vector<int64_t> lengths = {5, 9};
  const Trunk trunk(decoder.config(), network_views(decoder.layout(), decoder.flat_weights()),
                    decoder.rope_table());
  if (rank == 1) return flat;
  const Tensor tokens = random_tokens(decoder.config(), 14, static_cast<uint64_t>(10 + rank));
  TrunkRecord record;
  const Tensor hidden = trunk.forward(tokens, offsets_of(lengths), Recompute::off, &record);
  const NetworkTensors views = network_views(decoder.layout(), flat);
  views.head.add_(0.5 + rank);  // the head's share
  if (pieces != nullptr) pieces->at(PieceAct::give, kHeadPiece);
  trunk.backward(std::move(record), any_gradient(hidden), views, false, {}, pieces);
  return flat;
}

TEST(EarlySums, AreTheSumsOfWholeGradients) {
  for (const Family family : kFamilies) {
    for (const bool tied : {false, true}) {
      const ModelConfig config = testing::small_config(family, tied, /*bias=*/false);
      const TorchDecoder decoder(random_parameters(config, 5), at::kCPU, at::kFloat);
      const FlatLayout& layout = decoder.layout();
      for (const int size : {1, 2, 4}) {
        testing::on_ranks(size, [&](Ranks& ranks) {
          const at::NoGradGuard guard;
          HostGroup group(ranks);
          const FlatRange own = layout.part_of(ranks.rank(), size);
          const Tensor early = at::zeros({layout.size}, at::kFloat);
          EarlySums sums(layout, early, group);
          for (int step = 0; step < 2; ++step) {
            const Tensor late =
                gradients_of_rank(decoder, ranks.rank(), at::zeros_like(early), nullptr);
            group.reduce_scatter(late);
            early.zero_();
            sums.begin();
            gradients_of_rank(decoder, ranks.rank(), early, &sums);
            sums.finish();
            EXPECT_TRUE(at::equal(early.narrow(0, own.begin, own.count),
                                  late.narrow(0, own.begin, own.count)))
                << size << " ranks, tied " << tied;
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace leeway
