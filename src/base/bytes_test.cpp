#include "base/bytes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"

namespace leeway {
namespace {

enum class Fruit { apple, pear, plum };
struct Pair {
  int32_t id;
  float value;
  bool operator==(const Pair&) const = default;
};

TEST(Bytes, GiveBackWhatWasPut) {
  ByteWriter writer;
  writer.put(int64_t{-7});
  writer.put(uint8_t{255});
  writer.put(-0.0f);
  writer.put(std::numeric_limits<double>::quiet_NaN());
  writer.put(true);
  writer.put(Fruit::plum);
  writer.put("text");
  writer.put(std::string("with\0zero", 9));
  writer.put(std::vector<float>{1.5f, -2.5f});
  writer.put(std::vector<int32_t>{});
  writer.put(std::vector<Pair>{{3, 0.25f}});
  const std::vector<int64_t> numbers = {1, 2, 3};
  writer.put(std::span<const int64_t>(numbers).subspan(1));
  writer.put(numbers);
  const std::string message = writer.take();
  EXPECT_EQ(writer.take(), "") << "it begins anew";

  ByteReader reader(message);
  EXPECT_EQ(reader.get<int64_t>(), -7);
  EXPECT_EQ(reader.get<uint8_t>(), 255);
  EXPECT_TRUE(std::signbit(reader.get<float>()));
  EXPECT_TRUE(std::isnan(reader.get<double>()));
  EXPECT_TRUE(reader.get_bool());
  EXPECT_EQ(reader.get_enum(Fruit::plum), Fruit::plum);
  EXPECT_EQ(reader.get_string(), "text");
  EXPECT_EQ(reader.get_view(), std::string_view("with\0zero", 9));
  EXPECT_EQ(reader.get_list<float>(), (std::vector<float>{1.5f, -2.5f}));
  EXPECT_TRUE(reader.get_list<int32_t>().empty());
  EXPECT_EQ(reader.get_list<Pair>(), (std::vector<Pair>{{3, 0.25f}}));
  EXPECT_EQ(reader.get_list<int64_t>(), (std::vector<int64_t>{2, 3}));
  std::vector<int64_t> into(3);
  reader.get_list(std::span(into));
  EXPECT_EQ(into, numbers);
  reader.end();
}

std::string message_of(const auto& value) {
  ByteWriter writer;
  writer.put(value);
  return writer.take();
}

TEST(Bytes, RefuseWhatIsNotThere) {
  EXPECT_THROW(ByteReader("").get<uint8_t>(), Error);
  EXPECT_THROW(ByteReader("abc").get<int32_t>(), Error);
  EXPECT_THROW(ByteReader("abc").get_string(), Error);
  EXPECT_THROW(ByteReader("x").end(), Error);
  EXPECT_THROW(ByteReader("\2").get_bool(), Error);
  EXPECT_THROW(ByteReader("\3").get_enum(Fruit::plum), Error);
  // Lengths whose product with the element's size overflows are no invitation to read.
  for (const uint64_t length : {uint64_t{2}, uint64_t{1} << 61, uint64_t{1} << 62, ~uint64_t{0}}) {
    const std::string message = message_of(length) + "1234567";
    EXPECT_THROW(ByteReader(message).get_list<int64_t>(), Error) << length;
    EXPECT_THROW(ByteReader(message).get_count(8), Error) << length;
  }
  EXPECT_THROW(ByteReader(message_of(~uint64_t{0}) + "text").get_string(), Error);
  std::vector<float> into(3);
  const std::string two = message_of(std::vector<float>{1.0f, 2.0f});
  EXPECT_THROW(ByteReader(two).get_list(std::span(into)), Error);
}

// One random value per kind, written or read back; a reader of other kinds must end in Error or at
// the end. The sanitizers see a read past it.
constexpr uint64_t kKinds = 7;

void put_random(ByteWriter& writer, uint64_t kind, Rng& random) {
  const auto list = [&]<class T>(T) {
    std::vector<T> values(random.below(5));
    for (T& value : values) value = static_cast<T>(random.next());
    return values;
  };
  if (kind == 0) writer.put(static_cast<int64_t>(random.next()));
  if (kind == 1) writer.put(static_cast<uint8_t>(random.next()));
  if (kind == 2) writer.put(random.below(2) == 1);
  if (kind == 3) writer.put(static_cast<Fruit>(random.below(3)));
  if (kind == 4) writer.put(std::string(random.below(9), 'x'));
  if (kind == 5) writer.put(list(int64_t{}));
  if (kind == 6) writer.put(list(uint16_t{}));
}

void get_random(ByteReader& reader, uint64_t kind) {
  if (kind == 0) reader.get<int64_t>();
  if (kind == 1) reader.get<uint8_t>();
  if (kind == 2) reader.get_bool();
  if (kind == 3) reader.get_enum(Fruit::plum);
  if (kind == 4) reader.get_string();
  if (kind == 5) reader.get_list<int64_t>();
  if (kind == 6) reader.get_list<uint16_t>();
}

TEST(Bytes, SurviveDamagedMessages) {
  Rng random(5);
  int64_t whole = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    ByteWriter writer;
    std::vector<uint64_t> kinds(1 + random.below(8));
    for (uint64_t& kind : kinds) {
      kind = random.below(kKinds);
      put_random(writer, kind, random);
    }
    std::string message = writer.take();
    const uint64_t damage = random.below(5);
    const size_t place = random.below(message.size());
    if (damage == 1) message.resize(place);
    if (damage == 2) message[place] = static_cast<char>(random.next());
    if (damage == 3) message.push_back('\0');
    if (damage == 4) kinds[random.below(kinds.size())] = random.below(kKinds);
    // Exactly as long as the message, so that a byte behind it is not of a string's spare room.
    const std::vector<char> exact(message.begin(), message.end());
    ByteReader reader({exact.data(), exact.size()});
    bool read = true;
    try {
      for (const uint64_t kind : kinds) get_random(reader, kind);
      reader.end();
    } catch (const Error&) {
      read = false;
    }
    if (damage == 0) {
      EXPECT_TRUE(read) << round;
    } else if (damage == 1 || damage == 3) {
      EXPECT_FALSE(read) << round;
    }
    ++(read ? whole : refused);
  }
  EXPECT_GT(whole, 4000);
  EXPECT_GT(refused, 8000);
}

}  // namespace
}  // namespace leeway
