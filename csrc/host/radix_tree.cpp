// The radix tree's operations. Everything is a loop: neither a long prompt nor a deep chain uses stack.
#include "radix_tree.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace gristmill::host {

RadixTree::RadixTree(int64_t page_size) : page_size_(page_size) {
  if (page_size < 1) throw std::invalid_argument("page_size must be at least 1, got " + std::to_string(page_size));
  lru_.prev = lru_.next = &lru_;
}

RadixTree::Match RadixTree::match(Tokens ids, const std::string& extra_key) {
  Match result{kRootId, {}};
  Root* root = find_root(extra_key);
  if (root == nullptr) return result;

  const Position end = descend(root, ids);
  touch(end.node);
  result.node = end.node->id;
  result.slots.resize(end.length);
  int64_t stop = end.length;  // nodes fill [start, stop) from the deepest upwards
  for (const Node* node = end.node; node->parent != nullptr; node = node->parent) {
    const int64_t start = stop - node->length();
    std::copy(node->slots.begin(), node->slots.end(), result.slots.begin() + start);
    stop = start;
  }
  return result;
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

RadixTree::Insertion RadixTree::insert(Tokens ids, Tokens slots, const std::string& extra_key) {
  if (ids.size() != slots.size()) {
    throw std::invalid_argument("slots must have one entry per id: got " + std::to_string(ids.size()) + " ids and " +
                                std::to_string(slots.size()) + " slots");
  }
  const int64_t length = whole_pages(ids.size());
  if (length == 0) return {kRootId, 0};
  for (int64_t i = 0; i < length; ++i) {
    if (slots[i] < 0) {
      throw std::invalid_argument("slots must not be negative, got " + std::to_string(slots[i]) + " at position " +
                                  std::to_string(i));
    }
  }

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
    node = new_node(node, ids.subspan(present, length - present), slots.subspan(present, length - present));
    evictable_ += node->length();
    link_before(node, &lru_);
  }
  touch(node);
  return {node->id, present};
}

void RadixTree::lock(int64_t node_id) {
  if (node_id == kRootId) return;
  Node* node = &node_of(node_id);
  // A locked node's ancestors are locked already, so the walk ends at the first of them.
  const bool was_locked = node->is_locked();
  ++node->locks;
  if (was_locked) return;
  while (true) {
    unlink(node);
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
  --node->locks;
  // Released from the deepest node upwards, to the young end: what a request just used is the newest.
  while (node->parent != nullptr && !node->is_locked()) {
    link_before(node, &lru_);
    evictable_ += node->length();
    locked_ -= node->length();
    node = node->parent;
    --node->locked_children;
  }
}

std::vector<int32_t> RadixTree::evict(int64_t num_tokens) {
  if (num_tokens < 0) {
    throw std::invalid_argument("num_tokens must not be negative, got " + std::to_string(num_tokens));
  }
  int64_t wanted = std::min(num_tokens, evictable_);
  wanted = whole_pages(wanted + page_size_ - 1);  // evictable_ is whole pages, so this stays within it
  std::vector<int32_t> freed;
  freed.reserve(wanted);
  while (wanted > 0) {
    Node* leaf = static_cast<Node*>(lru_.next);
    const int64_t taken = std::min(wanted, leaf->length());
    const int64_t kept = leaf->length() - taken;
    freed.insert(freed.end(), leaf->slots.begin() + kept, leaf->slots.end());
    wanted -= taken;
    evictable_ -= taken;
    if (kept == 0) {
      remove_leaf(leaf);
    } else {
      leaf->tokens.resize(kept);
      leaf->slots.resize(kept);
      if (leaf->tokens.capacity() > 2 * leaf->tokens.size()) {
        leaf->tokens.shrink_to_fit();
        leaf->slots.shrink_to_fit();
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
  nodes_.clear();
  roots_.clear();
  lru_.prev = lru_.next = &lru_;
  evictable_ = 0;
  return freed;
}

std::vector<int32_t> RadixTree::all_slots() const {
  std::vector<int32_t> slots;
  slots.reserve(size());
  for (const auto& [id, node] : nodes_) slots.insert(slots.end(), node->slots.begin(), node->slots.end());
  return slots;
}

// -- structure ---------------------------------------------------------------------------------------------------

uint64_t RadixTree::page_hash(const int32_t* page) const {
  uint64_t hash = 0x9e3779b97f4a7c15ull;
  for (int64_t i = 0; i < page_size_; ++i) {
    hash = (hash ^ static_cast<uint32_t>(page[i])) * 0xff51afd7ed558ccdull;
    hash ^= hash >> 32;
  }
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
  lower->parent = upper;
  upper->children.emplace(page_hash(lower->tokens.data()), lower);
  if (lower->is_locked()) {
    upper->locked_children = 1;
  } else {
    link_before(upper, lower->next);  // just younger than its only child
  }
  return upper;
}

// Makes the unlocked nodes from `node` up to its root the youngest, descendants before ancestors.
void RadixTree::touch(Node* node) {
  for (; node->parent != nullptr && !node->is_locked(); node = node->parent) {
    unlink(node);
    link_before(node, &lru_);
  }
}

void RadixTree::remove_leaf(Node* leaf) {
  Node* parent = leaf->parent;
  const auto [first, last] = parent->children.equal_range(page_hash(leaf->tokens.data()));
  parent->children.erase(std::find_if(first, last, [&](const auto& entry) { return entry.second == leaf; }));
  unlink(leaf);
  nodes_.erase(leaf->id);
  if (parent->parent == nullptr && parent->children.empty()) {
    roots_.erase(roots_.find(static_cast<Root*>(parent)->extra_key));
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
  std::unordered_map<int64_t, int64_t> age;  // id -> place in the eviction order
  for (const LruLink* link = lru_.next; link != &lru_; link = link->next) {
    age.emplace(static_cast<const Node*>(link)->id, static_cast<int64_t>(age.size()));
  }
  int64_t evictable = 0;
  int64_t locked = 0;
  for (const auto& [id, node] : nodes_) {
    require(node->length() > 0 && node->length() % page_size_ == 0, "a node must hold whole pages", id);
    require(node->tokens.size() == node->slots.size(), "a node must hold one slot per token", id);
    require(find_child(*node->parent, node->tokens.data()) == node.get(), "a node must be its parent's child", id);
    require(node->is_locked() != (age.count(id) == 1), "exactly the unlocked nodes must be in the eviction order", id);
    int64_t locked_children = 0;
    for (const auto& [hash, child] : node->children) {
      require(child->parent == node.get(), "a child must know its parent", id);
      locked_children += child->is_locked();
      if (!node->is_locked()) require(age.at(child->id) < age.at(id), "a child must be evicted before its parent", id);
    }
    require(locked_children == node->locked_children, "locked children must be counted", id);
    (node->is_locked() ? locked : evictable) += node->length();
  }
  require(evictable == evictable_ && locked == locked_, "the counters must be the sums over the nodes", kRootId);
  for (const auto& [key, root] : roots_) require(!root->children.empty(), "an empty namespace must be gone", kRootId);
}

}  // namespace gristmill::host
