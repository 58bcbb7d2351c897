#include "torch/sampling_pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace leeway {
namespace {

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kLong).contiguous();
  return {wide.data_ptr<int64_t>(), wide.data_ptr<int64_t>() + wide.numel()};
}

using Numbers = std::vector<int64_t>;

TEST(SamplingPass, FillsUpToFewNumbersOfRows) {
  int64_t before = 0, numbers = 0;
  for (int64_t rows = 1; rows <= 512; ++rows) {
    const int64_t filled = filled_up(rows);
    ASSERT_GE(filled, rows);
    ASSERT_LE(filled - rows, std::max<int64_t>(7, rows / 4));
    ASSERT_EQ(filled_up(filled), filled);
    numbers += filled != before ? 1 : 0;
    before = filled;
  }
  EXPECT_LE(numbers, 32);
}

// Two samples of one request that decode, beside a prompt of three tokens or without it.
class Passes : public ::testing::Test {
 protected:
  Passes() {
    request_.request.sampling.temperature = 0.5f;
    request_.samples.resize(2);
    request_.samples[0].rng = Rng(1);
    request_.samples[1].rng = Rng(2);
    pass_.tokens = {7, 8};
    pass_.sequences = {{0, 1, 17, first_}, {1, 1, 3, second_}};
    pass_.logit_rows = {0, 1};
    pass_.draws = {{&request_, &request_.samples[0], 0}, {&request_, &request_.samples[1], 1}};
    pass_.decode_rows = 2;
  }
  void add_prompt() {
    pass_.tokens.insert(pass_.tokens.end(), {4, 5, 6});
    pass_.sequences.push_back({2, 3, 15, prompt_});
    pass_.prompt_rows = 3;
  }

  const int32_t first_[2] = {9, 4}, second_[1] = {2}, prompt_[2] = {5, 6};
  ScheduledRequest request_;
  StepRows pass_;
};

TEST_F(Passes, LaysOutRowsAndTables) {
  add_prompt();
  const PassShape shape = shape_of(pass_, true);
  EXPECT_FALSE(shape.decode);
  EXPECT_EQ(shape.rows, 5);
  EXPECT_EQ(shape.blocks, 5);
  PassIntegers integers(at::kCPU);
  EXPECT_TRUE(integers.reserve(shape));
  EXPECT_FALSE(integers.reserve(shape));
  integers.send(pass_, shape);
  const PassRows rows = integers.rows(shape);
  EXPECT_EQ(numbers(rows.tokens), (Numbers{7, 8, 4, 5, 6}));
  EXPECT_EQ(numbers(rows.positions), (Numbers{17, 3, 15, 16, 17}));
  EXPECT_EQ(numbers(rows.starts), (Numbers{0, 2, 3, 3, 3}));
  EXPECT_EQ(numbers(rows.blocks), (Numbers{9, 4, 2, 5, 6}));
  EXPECT_EQ(rows.decode_rows, 2);
  EXPECT_EQ(numbers(rows.tiles.flatten()), (Numbers{2, 3}));
  EXPECT_EQ(numbers(rows.logit_rows), (Numbers{0, 1}));
  EXPECT_EQ(numbers(rows.draws), (Numbers{0, 1}));
  EXPECT_EQ(rows.inverse_temperatures[1].item<float>(), 2.0f);
  EXPECT_EQ(rows.uniforms[0].item<double>(), Rng(1).uniform());
  EXPECT_EQ(rows.uniforms[1].item<double>(), Rng(2).uniform());
  Rng next(1);
  next.uniform();
  EXPECT_EQ(request_.samples[0].rng.next(), next.next()) << "one number was taken";
}

TEST_F(Passes, FillsDecodePassesWithRowsThatAreNowhere) {
  pass_.tokens.push_back(3);
  pass_.sequences.push_back({2, 1, 16, prompt_});
  pass_.decode_rows = 3;
  pass_.logit_rows.push_back(2);
  request_.request.sampling.temperature = 0.0f;
  pass_.draws.push_back({&request_, &request_.samples[0], 2});
  const PassShape shape = shape_of(pass_, true);
  EXPECT_TRUE(shape.decode);
  EXPECT_EQ(shape.rows, 4);
  EXPECT_EQ(shape.draws, 4);
  EXPECT_EQ(shape_of(pass_, false).rows, 3);
  PassIntegers integers(at::kCPU);
  integers.reserve(shape);
  integers.send(pass_, shape);
  const PassRows rows = integers.rows(shape);
  EXPECT_EQ(numbers(rows.tokens), (Numbers{7, 8, 3, 0}));
  EXPECT_EQ(rows.decode_rows, 4);
  EXPECT_FALSE(rows.tiles.defined());
  EXPECT_EQ(numbers(rows.positions), (Numbers{17, 3, 16, -1}));
  EXPECT_EQ(numbers(rows.draws), (Numbers{0, 1, 2, 0}));
  EXPECT_EQ(rows.inverse_temperatures[0].item<float>(), 0.0f);
}

TEST_F(Passes, CutsPromptsIntoTilesLongestFirst) {
  std::vector<int32_t> blocks(20);
  pass_.tokens.insert(pass_.tokens.end(), 150 + 10, 1);
  pass_.sequences.push_back({2, 150, 0, blocks.data()});
  pass_.sequences.push_back({152, 10, 300, blocks.data()});
  pass_.prompt_rows = 160;
  const PassShape shape = shape_of(pass_, true);
  EXPECT_EQ(shape.tiles, 3);
  PassIntegers integers(at::kCPU);
  integers.reserve(shape);
  integers.send(pass_, shape);
  EXPECT_EQ(numbers(integers.rows(shape).tiles.flatten()), (Numbers{152, 10, 130, 22, 2, 128}));
}

}  // namespace
}  // namespace leeway
