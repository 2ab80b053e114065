// The radix tree's operations. Everything is a loop: neither a long prompt nor a deep chain uses stack.
#include "radix_tree.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace gristmill::host {

Eviction eviction_named(std::string_view name) {
  if (name == "lru") return Eviction::kLru;
  if (name == "lfu") return Eviction::kLfu;
  if (name == "fifo") return Eviction::kFifo;
  if (name == "priority") return Eviction::kPriority;
  if (name == "slru") return Eviction::kSlru;
  throw std::invalid_argument("eviction must be lru, lfu, fifo, priority or slru, got '" + std::string(name) + "'");
}

RadixTree::RadixTree(int64_t page_size, Eviction eviction, int64_t window, bool events)
    : page_size_(page_size),
      eviction_(eviction),
      window_(window),
      has_events_(events),
      leaves_(EvictsBefore{eviction}) {
  if (page_size < 1) throw std::invalid_argument("page_size must be at least 1, got " + std::to_string(page_size));
  if (window < 0) throw std::invalid_argument("window must not be negative, got " + std::to_string(window));
  lru_.prev = lru_.next = &lru_;
  window_lru_.prev = window_lru_.next = &window_lru_;
}

RadixTree::Match RadixTree::match(Tokens ids, const std::string& extra_key) {
  Root* root = find_root(extra_key);
  if (root == nullptr) return {kRootId, {}};

  const Position end = descend(root, ids);
  touch(end.node, true, end.node->priority);
  return {end.node->id, slots_to(end.node)};
}

int64_t RadixTree::match_length(Tokens ids, const std::string& extra_key) const {
  const Node* node = find_root(extra_key);
  if (node == nullptr) return 0;
  ids = ids.first(whole_pages(ids.size()));
  int64_t length = 0;
  while (length < static_cast<int64_t>(ids.size())) {
    const Node* child = find_child(*node, ids.data() + length);
    if (child == nullptr) break;
    const int64_t common = common_pages(*child, ids.subspan(length));
    length += common;
    if (common < child->length()) break;
    node = child;
  }
  return length;
}

RadixTree::Path RadixTree::match_path(Tokens ids, const std::string& extra_key) const {
  Path path{0, {}};
  const Node* node = find_root(extra_key);
  if (node == nullptr) return path;
  ids = ids.first(whole_pages(ids.size()));
  while (path.length < static_cast<int64_t>(ids.size())) {
    const Node* child = find_child(*node, ids.data() + path.length);
    if (child == nullptr) break;
    const int64_t common = common_pages(*child, ids.subspan(path.length));
    path.length += common;
    path.nodes.push_back(child->id);
    if (common < child->length()) break;
    node = child;
  }
  return path;
}

RadixTree::Insertion RadixTree::insert(Tokens ids, Tokens slots, const std::string& extra_key, int64_t priority) {
  const auto [node, present] = adopt(ids, slots, extra_key, priority);
  return {node == nullptr ? kRootId : node->id, present};
}

void RadixTree::require_slots(Tokens slots, const char* name) {
  int32_t signs = 0;  // without a branch in the loop, so that it is vectorized
  for (const int32_t slot : slots) signs |= slot;
  if (signs >= 0) return;
  const auto negative = std::find_if(slots.begin(), slots.end(), [](int32_t slot) { return slot < 0; });
  throw std::invalid_argument(std::string(name) + " must not be negative, got " + std::to_string(*negative) +
                              " at position " + std::to_string(negative - slots.begin()));
}

// The insert. `length` of the result is how many tokens were there before; `node` is null if `ids` fills no page.
RadixTree::Position RadixTree::adopt(Tokens ids, Tokens slots, const std::string& extra_key, int64_t priority) {
  if (ids.size() != slots.size()) {
    throw std::invalid_argument("slots must have one entry per id: got " + std::to_string(ids.size()) + " ids and " +
                                std::to_string(slots.size()) + " slots");
  }
  const int64_t length = whole_pages(ids.size());
  if (length == 0) return {nullptr, 0};
  require_slots(slots.first(length), "slots");

  Root* root = find_root(extra_key);
  if (root == nullptr) {
    auto created = std::make_unique<Root>();
    created->extra_key = extra_key;
    root = created.get();
    roots_.emplace(extra_key, std::move(created));
  }
  // [0, present) is in the tree, [present, length) is adopted, and what is left fills no page.
  auto [node, present] = descend(root, ids);
  if (present < length) {
    const bool was_leaf = node->parent != nullptr && node->children.empty() && !node->is_locked();
    if (was_leaf && eviction_ != Eviction::kLru) leaves_.erase(node);
    node = new_node(node, ids.subspan(present, length - present), slots.subspan(present, length - present));
    node->created = node->used = clock_ + 1;
    node->uses = 1;
    node->priority = priority;
    evictable_ += node->length();
    if (has_events_) {
      node->pages = chain_hashes(hash_before(*node), node->tokens);
      record_stored(*node);
    }
    order(node);
  }
  touch(node, false, priority);
  return {node, present};
}

void RadixTree::lock(int64_t node_id) {
  if (node_id == kRootId) return;
  Node* node = &node_of(node_id);
  // A locked node's ancestors are locked already, so the walk ends at the first of them.
  const bool was_locked = node->is_locked();
  ++node->locks;
  if (was_locked) return;
  while (true) {
    unorder(node);
    evictable_ -= node->length();
    locked_ += node->length();
    node = node->parent;
    const bool stop = node->parent == nullptr || node->is_locked();
    ++node->locked_children;
    if (stop) return;
  }
}

void RadixTree::unlock(int64_t node_id) {
  if (node_id == kRootId) return;
  Node* node = &node_of(node_id);
  if (node->locks == 0) {
    throw std::invalid_argument("node " + std::to_string(node_id) +
                                " is not locked: every unlock must follow a lock of the same node");
  }
  if (window_ > 0 && node->locks == 1) {
    // A full lock outlives the window lock beside it, or evict could take slots that are locked.
    for (const Node* at = node; at->parent != nullptr; at = at->parent) {
      if (at->locks != (at == node ? 1 : 0) || at->locked_children != (at == node ? 0 : 1)) break;
      if (at->window && at->window->locks > 0) {
        throw std::invalid_argument("node " + std::to_string(node_id) +
                                    " still has a window lock: call unlock_window before unlock");
      }
    }
  }
  --node->locks;
  ++clock_;
  // Released from the deepest node upwards, to the young end: what a request just used is the newest.
  while (node->parent != nullptr && !node->is_locked()) {
    node->used = clock_;
    order(node);
    evictable_ += node->length();
    locked_ -= node->length();
    node = node->parent;
    --node->locked_children;
  }
}

std::vector<int32_t> RadixTree::evict(int64_t num_tokens) {
  int64_t wanted = pages_to_evict(num_tokens, evictable_);
  std::vector<int32_t> freed;
  freed.reserve(wanted);
  if (has_events_ && wanted > 0)
    events_.push_back({.stored = false, .parent = {}, .pages = {}, .tokens = {}, .extra_key = {}});
  while (wanted > 0) {
    Node* leaf = next_to_evict();
    const int64_t taken = std::min(wanted, leaf->length());
    const int64_t kept = leaf->length() - taken;
    freed.insert(freed.end(), leaf->slots.begin() + kept, leaf->slots.end());
    wanted -= taken;
    evictable_ -= taken;
    drop_window(leaf, kept);
    if (has_events_) record_removed(*leaf, kept);
    if (kept == 0) {
      remove_leaf(leaf);
    } else {
      leaf->tokens.resize(kept);
      leaf->slots.resize(kept);
      if (has_events_) leaf->pages.resize(kept / page_size_);
      if (leaf->tokens.capacity() > 2 * leaf->tokens.size()) {
        leaf->tokens.shrink_to_fit();
        leaf->slots.shrink_to_fit();
        leaf->pages.shrink_to_fit();
      }
    }
  }
  return freed;
}

std::vector<int32_t> RadixTree::clear() {
  if (locked_ > 0) {
    throw std::runtime_error("clear needs a tree without locks, but " + std::to_string(locked_) + " tokens are locked");
  }
  std::vector<int32_t> freed = all_slots();
  const std::vector<int32_t> freed_window = all_window_slots();
  freed_window_.insert(freed_window_.end(), freed_window.begin(), freed_window.end());
  if (has_events_ && !nodes_.empty()) {
    std::vector<const Node*> deepest_first;
    for (const auto& [id, node] : nodes_) deepest_first.push_back(node.get());
    std::sort(deepest_first.begin(), deepest_first.end(), [](const Node* left, const Node* right) {
      return std::tie(right->start, right->id) < std::tie(left->start, left->id);
    });
    events_.push_back({.stored = false, .parent = {}, .pages = {}, .tokens = {}, .extra_key = {}});
    for (const Node* node : deepest_first) record_removed(*node, 0);
  }
  leaves_.clear();
  nodes_.clear();
  roots_.clear();
  lru_.prev = lru_.next = &lru_;
  window_lru_.prev = window_lru_.next = &window_lru_;
  evictable_ = window_evictable_ = 0;
  return freed;
}

std::vector<int32_t> RadixTree::all_slots() const {
  std::vector<int32_t> slots;
  slots.reserve(size());
  for (const auto& [id, node] : nodes_) slots.insert(slots.end(), node->slots.begin(), node->slots.end());
  return slots;
}

int64_t RadixTree::pages_to_evict(int64_t num_tokens, int64_t evictable) const {
  if (num_tokens < 0) {
    throw std::invalid_argument("num_tokens must not be negative, got " + std::to_string(num_tokens));
  }
  return whole_pages(std::min(num_tokens, evictable) + page_size_ - 1);  // `evictable` is whole pages: never above it
}

// -- eviction order ----------------------------------------------------------------------------------------------

bool RadixTree::EvictsBefore::operator()(const Node* left, const Node* right) const {
  const auto key = [this](const Node* node) -> std::tuple<int64_t, int64_t, int64_t> {
    switch (eviction) {
      case Eviction::kLfu:
        return {node->uses, node->used, node->id};
      case Eviction::kFifo:
        return {node->created, 0, node->id};
      case Eviction::kPriority:
        return {node->priority, node->used, node->id};
      case Eviction::kSlru:
        return {node->uses > 1, node->used, node->id};
      case Eviction::kLru:
        break;
    }
    return {node->used, 0, node->id};
  };
  return key(left) < key(right);
}

// Puts an unlocked node, whose history is up to date, where its turn is. As it is the last one used, that is the young
// end of the list.
void RadixTree::order(Node* node) {
  if (eviction_ == Eviction::kLru) {
    link_before(node, &lru_);
  } else if (node->children.empty()) {
    leaves_.insert(node);
  }
}

// Before a node is locked or removed, while its history is still what it was ordered by.
void RadixTree::unorder(Node* node) {
  if (eviction_ == Eviction::kLru) {
    unlink(node);
  } else if (node->children.empty()) {
    leaves_.erase(node);
  }
}

RadixTree::Node* RadixTree::next_to_evict() const {
  return eviction_ == Eviction::kLru ? static_cast<Node*>(lru_.next) : *leaves_.begin();
}

// Makes the unlocked nodes from `node` up to its root the youngest, descendants before ancestors.
void RadixTree::touch(Node* node, bool matched, int64_t priority) {
  ++clock_;
  if (eviction_ == Eviction::kLru) {
    for (; node->parent != nullptr && !node->is_locked(); node = node->parent) {
      node->used = clock_;
      unlink(node);
      link_before(node, &lru_);
    }
    return;
  }
  // Only the deepest node can be a leaf; what is under a lock keeps counting.
  Node* leaf = node->parent != nullptr && node->children.empty() && !node->is_locked() ? node : nullptr;
  if (leaf != nullptr) leaves_.erase(leaf);
  for (; node->parent != nullptr; node = node->parent) {
    node->used = clock_;
    node->uses += matched;
    node->priority = std::max(node->priority, priority);
  }
  if (leaf != nullptr) leaves_.insert(leaf);
}

// -- events ------------------------------------------------------------------------------------------------------

namespace {

uint64_t mix(uint64_t hash, uint32_t value) {
  hash = (hash ^ value) * 0xff51afd7ed558ccdull;
  return hash ^ hash >> 32;
}

constexpr uint64_t kHashSeed = 0x9e3779b97f4a7c15ull;

}  // namespace

// Each page's hash continues the one before it. The same in every process, so that a router can compute it.
std::vector<uint64_t> RadixTree::chain_hashes(uint64_t before, Tokens tokens) const {
  std::vector<uint64_t> hashes;
  hashes.reserve(tokens.size() / page_size_);
  for (size_t start = 0; start < tokens.size(); start += page_size_) {
    for (const int32_t token : tokens.subspan(start, page_size_)) before = mix(before, static_cast<uint32_t>(token));
    hashes.push_back(before);
  }
  return hashes;
}

// What the hash of the node's first page continues: the page before it, or the bytes of the extra key.
uint64_t RadixTree::hash_before(const Node& node) const {
  if (node.parent->parent != nullptr) return node.parent->pages.back();
  uint64_t hash = kHashSeed;
  for (const char byte : static_cast<const Root*>(node.parent)->extra_key) {
    hash = mix(hash, static_cast<unsigned char>(byte));
  }
  return ~hash;  // or the key "a" would be the token 97
}

void RadixTree::record_stored(const Node& node) {
  const Node* root = node.parent;
  while (root->parent != nullptr) root = root->parent;
  events_.push_back({
      .stored = true,
      .parent = node.start == 0 ? std::nullopt : std::optional<uint64_t>(hash_before(node)),
      .pages = node.pages,
      .tokens = node.tokens,
      .extra_key = static_cast<const Root*>(root)->extra_key,
  });
}

// Adds the pages of `node` from its token `kept` on to the event in progress.
void RadixTree::record_removed(const Node& node, int64_t kept) {
  std::vector<uint64_t>& pages = events_.back().pages;
  pages.insert(pages.end(), node.pages.rbegin(), node.pages.rend() - kept / page_size_);
}

// -- structure ---------------------------------------------------------------------------------------------------

uint64_t RadixTree::page_hash(const int32_t* page) const {
  uint64_t hash = kHashSeed;
  for (int64_t i = 0; i < page_size_; ++i) hash = mix(hash, static_cast<uint32_t>(page[i]));
  return hash;
}

RadixTree::Node* RadixTree::find_child(const Node& parent, const int32_t* page) const {
  const auto [first, last] = parent.children.equal_range(page_hash(page));
  for (auto it = first; it != last; ++it) {
    if (std::memcmp(it->second->tokens.data(), page, page_size_ * sizeof(int32_t)) == 0) return it->second;
  }
  return nullptr;
}

int64_t RadixTree::common_pages(const Node& node, Tokens ids) const {
  const int64_t limit = std::min<int64_t>(node.length(), ids.size());
  const int32_t* ours = node.tokens.data();
  constexpr int64_t kBlock = 64;
  int64_t same = 0;
  while (same + kBlock <= limit && std::memcmp(ours + same, ids.data() + same, kBlock * sizeof(int32_t)) == 0)
    same += kBlock;
  while (same < limit && ours[same] == ids[same]) ++same;
  return whole_pages(same);
}

RadixTree::Root* RadixTree::find_root(const std::string& extra_key) const {
  const auto it = roots_.find(extra_key);
  return it == roots_.end() ? nullptr : it->second.get();
}

RadixTree::Node& RadixTree::node_of(int64_t id) const {
  const auto it = nodes_.find(id);
  if (it == nodes_.end()) {
    throw std::invalid_argument(
        "node " + std::to_string(id) +
        " is not in the tree: it was evicted, cleared or never made, so match the prompt again");
  }
  return *it->second;
}

// The longest cached prefix of `ids`, split so that it ends at the end of a node.
RadixTree::Position RadixTree::descend(Node* root, Tokens ids) {
  ids = ids.first(whole_pages(ids.size()));
  Position at{root, 0};
  while (at.length < static_cast<int64_t>(ids.size())) {
    Node* child = find_child(*at.node, ids.data() + at.length);
    if (child == nullptr) break;
    const int64_t common = common_pages(*child, ids.subspan(at.length));
    at.length += common;
    if (common < child->length()) {
      at.node = split(child, common);
      break;
    }
    at.node = child;
  }
  return at;
}

RadixTree::Node* RadixTree::new_node(Node* parent, Tokens tokens, Tokens slots) {
  auto node = std::make_unique<Node>();
  node->id = next_id_++;
  node->parent = parent;
  node->start = parent->end();
  node->tokens.assign(tokens.begin(), tokens.end());
  node->slots.assign(slots.begin(), slots.end());
  parent->children.emplace(page_hash(tokens.data()), node.get());
  return (nodes_[node->id] = std::move(node)).get();
}

// Cuts `lower` after its first `length` tokens and returns the new upper node; `lower` keeps its id, its locks and its
// children.
RadixTree::Node* RadixTree::split(Node* lower, int64_t length) {
  Node* parent = lower->parent;
  const auto [first, last] = parent->children.equal_range(page_hash(lower->tokens.data()));
  parent->children.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == lower; }));

  Node* upper = new_node(parent, Tokens(lower->tokens).first(length), Tokens(lower->slots).first(length));
  lower->tokens = std::vector<int32_t>(lower->tokens.begin() + length, lower->tokens.end());
  lower->slots = std::vector<int32_t>(lower->slots.begin() + length, lower->slots.end());
  lower->start = upper->end();
  lower->parent = upper;
  upper->created = lower->created;
  upper->used = lower->used;
  upper->uses = lower->uses;
  upper->priority = lower->priority;
  if (has_events_) {
    const auto cut = lower->pages.begin() + length / page_size_;
    upper->pages.assign(lower->pages.begin(), cut);
    lower->pages = std::vector<uint64_t>(cut, lower->pages.end());
  }
  if (lower->window) split_window(upper, lower);
  upper->children.emplace(page_hash(lower->tokens.data()), lower);
  if (lower->is_locked()) {
    upper->locked_children = 1;
  } else if (eviction_ == Eviction::kLru) {
    link_before(upper, lower->next);  // just younger than its only child
  }
  return upper;
}

// Makes `position` the border of two nodes on the path to `node`; it lies before the end of `node`.
void RadixTree::split_at(Node* node, int64_t position) {
  while (node->start > position) node = node->parent;
  if (node->start < position) split(node, position - node->start);
}

std::vector<int32_t> RadixTree::slots_to(const Node* node) const {
  std::vector<int32_t> slots(node->end());
  for (; node->parent != nullptr; node = node->parent) {
    std::copy(node->slots.begin(), node->slots.end(), slots.begin() + node->start);
  }
  return slots;
}

void RadixTree::remove_leaf(Node* leaf) {
  Node* parent = leaf->parent;
  const auto [first, last] = parent->children.equal_range(page_hash(leaf->tokens.data()));
  parent->children.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == leaf; }));
  unorder(leaf);
  nodes_.erase(leaf->id);
  if (!parent->children.empty()) return;
  if (parent->parent == nullptr) {
    roots_.erase(roots_.find(static_cast<Root*>(parent)->extra_key));
  } else if (eviction_ != Eviction::kLru && !parent->is_locked()) {
    leaves_.insert(parent);
  }
}

void RadixTree::unlink(LruLink* link) {
  link->prev->next = link->next;
  link->next->prev = link->prev;
  link->prev = link->next = nullptr;
}

void RadixTree::link_before(LruLink* link, LruLink* next) {
  link->prev = next->prev;
  link->next = next;
  next->prev->next = link;
  next->prev = link;
}

// Recomputes every invariant from scratch; for tests.
void RadixTree::check() const {
  const auto require = [](bool ok, const char* what, int64_t id) {
    if (!ok) throw std::logic_error(std::string(what) + " (node " + std::to_string(id) + ")");
  };
  const bool lru = eviction_ == Eviction::kLru;
  std::unordered_map<int64_t, int64_t> age;  // id -> place in the eviction order
  int64_t latest = 0;
  for (const LruLink* link = lru_.next; link != &lru_; link = link->next) {
    const Node* node = static_cast<const Node*>(link);
    require(lru && node->used >= latest, "the list must hold the least recently used node first", node->id);
    latest = node->used;
    age.emplace(node->id, static_cast<int64_t>(age.size()));
  }
  const Node* before = nullptr;
  for (const Node* node : leaves_) {
    require(!lru && (before == nullptr || EvictsBefore{eviction_}(before, node)), "leaves must be ordered", node->id);
    before = node;
    age.emplace(node->id, static_cast<int64_t>(age.size()));
  }
  int64_t evictable = 0;
  int64_t locked = 0;
  for (const auto& [id, node] : nodes_) {
    require(node->length() > 0 && node->length() % page_size_ == 0, "a node must hold whole pages", id);
    require(node->tokens.size() == node->slots.size(), "a node must hold one slot per token", id);
    require(node->start == node->parent->end(), "a node must start where its parent ends", id);
    require(find_child(*node->parent, node->tokens.data()) == node.get(), "a node must be its parent's child", id);
    require(!has_events_ || node->pages == chain_hashes(hash_before(*node), node->tokens), "hashes must be a chain",
            id);
    const bool in_order = !node->is_locked() && (lru || node->children.empty());
    require(in_order == (age.count(id) == 1), "exactly what may be evicted must be in the eviction order", id);
    int64_t locked_children = 0;
    for (const auto& [hash, child] : node->children) {
      require(child->parent == node.get(), "a child must know its parent", id);
      require(
          lru || (child->created >= node->created && child->uses <= node->uses && child->priority <= node->priority),
          "what covers a child must have counted for its parent", id);
      locked_children += child->is_locked();
      if (!node->is_locked()) {
        require(child->used <= node->used, "a parent must have been used with its child", id);
        require(!lru || age.at(child->id) < age.at(id), "a child must be evicted before its parent", id);
      }
    }
    require(locked_children == node->locked_children, "locked children must be counted", id);
    (node->is_locked() ? locked : evictable) += node->length();
  }
  require(evictable == evictable_ && locked == locked_, "the counters must be the sums over the nodes", kRootId);
  for (const auto& [key, root] : roots_) require(!root->children.empty(), "an empty namespace must be gone", kRootId);
  check_window();
}

namespace {

// What glibc's malloc takes for a block: a header of 8 bytes, in steps of 16.
size_t heap_bytes(size_t size) { return size == 0 ? 0 : std::max<size_t>(32, (size + 8 + 15) / 16 * 16); }

template <typename T>
size_t heap_bytes(const std::vector<T>& values) {
  return heap_bytes(values.capacity() * sizeof(T));
}

// A chained hash table: an array of buckets (one is built in) and a block per entry with the link and maybe the hash.
template <typename Table>
size_t table_bytes(const Table& table) {
  const size_t buckets = table.bucket_count() > 1 ? heap_bytes(table.bucket_count() * sizeof(void*)) : 0;
  return buckets + table.size() * heap_bytes(sizeof(typename Table::value_type) + sizeof(void*));
}

}  // namespace

int64_t RadixTree::memory_bytes() const {
  size_t bytes = sizeof(*this) + table_bytes(nodes_) + table_bytes(roots_) + heap_bytes(freed_window_);
  bytes += leaves_.size() * heap_bytes(sizeof(Node*) + 4 * sizeof(void*));
  for (const auto& [key, root] : roots_) bytes += heap_bytes(sizeof(Root)) + table_bytes(root->children);
  for (const auto& [id, node] : nodes_) {
    bytes += heap_bytes(sizeof(Node)) + heap_bytes(node->tokens) + heap_bytes(node->slots) + heap_bytes(node->pages);
    bytes += table_bytes(node->children);
    if (node->window) {
      bytes += heap_bytes(sizeof(Window)) + heap_bytes(node->window->slots);
    }
  }
  bytes += heap_bytes(events_);
  for (const Event& event : events_) bytes += heap_bytes(event.pages) + heap_bytes(event.tokens);
  return static_cast<int64_t>(bytes);
}

}  // namespace gristmill::host
