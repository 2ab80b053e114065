// The sliding-window part of the radix tree: window slots that come and go while the full-attention slots stay.
//
// Eviction order. All nodes with window slots and without window locks are in one list, least recently used first. One
// touch covers the positions [start, n) that a request reads; among those the first position is the oldest: a longer
// continuation of the prefix stops needing it first. Nothing is leaf-first here: any node may lose its window slots.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "radix_tree.h"

namespace gristmill::host {

RadixTree::WindowMatch RadixTree::match_window(Tokens ids, const std::string& extra_key) {
  require_window();
  const auto [found, length] = usable_prefix(ids, extra_key);
  if (found == nullptr) return {kRootId, {}, 0, {}};
  Node* node = &node_of(found->id);
  if (length < node->end()) node = split(node, length - node->start);
  const int64_t start = whole_pages(std::max<int64_t>(0, length - window_));
  split_at(node, start);
  touch(node, true, node->priority);
  touch_window(node, start);

  WindowMatch match{node->id, slots_to(node), start, std::vector<int32_t>(length - start)};
  for (; node->parent != nullptr && node->start >= start; node = node->parent) {
    const std::vector<int32_t>& slots = node->window->slots;
    std::copy(slots.begin(), slots.end(), match.window_slots.begin() + (node->start - start));
  }
  return match;
}

int64_t RadixTree::match_window_length(Tokens ids, const std::string& extra_key) const {
  require_window();
  return usable_prefix(ids, extra_key).length;
}

RadixTree::WindowInsertion RadixTree::insert_window(Tokens ids, Tokens slots, int64_t window_start, Tokens window_slots,
                                                    const std::string& extra_key, int64_t priority) {
  require_window();
  const int64_t num_ids = static_cast<int64_t>(ids.size());
  if (window_start < 0 || window_start > num_ids || window_start % page_size_ != 0) {
    throw std::invalid_argument("window_start must be a multiple of the page size " + std::to_string(page_size_) +
                                " from 0 to " + std::to_string(num_ids) + ", got " + std::to_string(window_start));
  }
  if (static_cast<int64_t>(window_slots.size()) != num_ids - window_start) {
    throw std::invalid_argument("window_slots must have one entry per id from window_start on: got " +
                                std::to_string(window_slots.size()) + " for " + std::to_string(num_ids - window_start));
  }
  require_slots(window_slots, "window_slots");
  const auto [end, present] = adopt(ids, slots, extra_key, priority);
  if (end == nullptr) return {kRootId, present, {}};
  WindowInsertion done{end->id, present, {}};
  if (window_start >= end->end()) return done;
  split_at(end, window_start);
  std::vector<int32_t>& taken = done.taken;  // built from the end: stop, start, stop, start, ...
  for (Node* node = end; node->parent != nullptr && node->start >= window_start; node = node->parent) {
    if (node->window) continue;
    give_window(node, window_slots.subspan(node->start - window_start, node->length()));
    if (!taken.empty() && taken.back() == node->end()) {
      taken.back() = static_cast<int32_t>(node->start);
    } else {
      taken.push_back(static_cast<int32_t>(node->end()));
      taken.push_back(static_cast<int32_t>(node->start));
    }
  }
  std::reverse(taken.begin(), taken.end());
  touch_window(end, window_start);
  return done;
}

void RadixTree::lock_window(int64_t node_id, int64_t start, int64_t end) {
  Node* node = window_range(node_id, start, end);
  if (node == nullptr) return;
  if (!node->is_locked()) {
    throw std::invalid_argument("node " + std::to_string(node_id) + " is not locked: call lock before lock_window");
  }
  for (const Node* at = node; at->parent != nullptr && at->end() > start; at = at->parent) {
    if (at->window) continue;
    throw std::invalid_argument("node " + std::to_string(node_id) + " has no window slots for positions " +
                                std::to_string(std::max(at->start, start)) + " to " +
                                std::to_string(std::min(at->end(), end)));
  }
  node = cut_out(node, start, end);
  for (; node->parent != nullptr && node->start >= start; node = node->parent) {
    if (node->window->locks++ > 0) continue;
    unlink(node->window.get());
    window_evictable_ -= node->length();
    window_locked_ += node->length();
  }
}

void RadixTree::unlock_window(int64_t node_id, int64_t start, int64_t end) {
  Node* node = window_range(node_id, start, end);
  if (node == nullptr) return;
  for (const Node* at = node; at->parent != nullptr && at->end() > start; at = at->parent) {
    if (at->window && at->window->locks > 0) continue;
    throw std::invalid_argument("node " + std::to_string(node_id) + " has no window lock on positions " +
                                std::to_string(std::max(at->start, start)) + " to " +
                                std::to_string(std::min(at->end(), end)) +
                                ": every unlock_window must follow a lock_window of the same positions");
  }
  node = cut_out(node, start, end);
  ++clock_;
  LruLink* next = &window_lru_;
  for (; node->parent != nullptr && node->start >= start; node = node->parent) {
    Window* window = node->window.get();
    if (--window->locks > 0) continue;
    window->used = clock_;
    link_before(window, next);
    next = window;
    window_evictable_ += node->length();
    window_locked_ -= node->length();
  }
}

// The deepest node with positions of [start, end) on the path to `node_id`; null if the range is empty.
RadixTree::Node* RadixTree::window_range(int64_t node_id, int64_t start, int64_t end) const {
  require_window();
  Node* node = node_id == kRootId ? nullptr : &node_of(node_id);
  const int64_t limit = node == nullptr ? 0 : node->end();
  if (start < 0 || start > end || end > limit || start % page_size_ != 0 || end % page_size_ != 0) {
    throw std::invalid_argument("start and end must be multiples of the page size " + std::to_string(page_size_) +
                                " with 0 <= start <= end <= " + std::to_string(limit) + ", got " +
                                std::to_string(start) + " and " + std::to_string(end));
  }
  if (start == end) return nullptr;
  while (node->start >= end) node = node->parent;
  return node;
}

// Makes `start` and `end` borders of nodes, and returns the node that ends at `end`; `node` holds the position before.
RadixTree::Node* RadixTree::cut_out(Node* node, int64_t start, int64_t end) {
  if (end < node->end()) node = split(node, end - node->start);
  split_at(node, start);
  return node;
}

std::vector<int32_t> RadixTree::evict_window(int64_t num_tokens) {
  require_window();
  int64_t wanted = pages_to_evict(num_tokens, window_evictable_);
  std::vector<int32_t> freed;
  freed.reserve(wanted);
  while (wanted > 0) {
    Node* node = static_cast<Window*>(window_lru_.next)->node;
    if (wanted < node->length()) node = split(node, wanted);  // the upper part, which is the older one
    freed.insert(freed.end(), node->window->slots.begin(), node->window->slots.end());
    wanted -= node->length();
    window_evictable_ -= node->length();
    unlink(node->window.get());
    node->window.reset();
  }
  return freed;
}

std::vector<int32_t> RadixTree::all_window_slots() const {
  std::vector<int32_t> slots;
  slots.reserve(window_size());
  for (const auto& [id, node] : nodes_) {
    if (node->window) slots.insert(slots.end(), node->window->slots.begin(), node->window->slots.end());
  }
  return slots;
}

void RadixTree::require_window() const {
  if (window_ == 0) throw std::invalid_argument("this tree has no sliding window: make it with window > 0");
}

// The longest cached prefix of n tokens with window slots for all of [n - window, n).
RadixTree::ConstPosition RadixTree::usable_prefix(Tokens ids, const std::string& extra_key) const {
  ConstPosition best{nullptr, 0};
  const Node* node = find_root(extra_key);
  if (node == nullptr) return best;
  ids = ids.first(whole_pages(ids.size()));
  int64_t length = 0;
  int64_t run = 0;  // all of [run, length) has window slots
  while (length < static_cast<int64_t>(ids.size())) {
    const Node* child = find_child(*node, ids.data() + length);
    if (child == nullptr) break;
    const int64_t common = common_pages(*child, ids.subspan(length));
    length += common;
    // Within one node the longest prefix is usable if any is.
    if (!child->window) {
      run = length;
    } else if (run <= std::max<int64_t>(0, length - window_)) {
      best = {child, length};
    }
    if (common < child->length()) break;
    node = child;
  }
  return best;
}

void RadixTree::give_window(Node* node, Tokens slots) {
  node->window = std::make_unique<Window>();
  node->window->node = node;
  node->window->slots.assign(slots.begin(), slots.end());
  link_before(node->window.get(), &window_lru_);
  window_evictable_ += node->length();
}

// Before the tokens of `node` from `kept` on leave the tree. They are not locked, so their window slots are not either.
void RadixTree::drop_window(Node* node, int64_t kept) {
  if (!node->window) return;
  std::vector<int32_t>& slots = node->window->slots;
  freed_window_.insert(freed_window_.end(), slots.begin() + kept, slots.end());
  window_evictable_ -= node->length() - kept;
  if (kept == 0) {
    unlink(node->window.get());
    node->window.reset();
  } else {
    slots.resize(kept);
    if (slots.capacity() > 2 * slots.size()) slots.shrink_to_fit();
  }
}

// Makes the unlocked window slots of [start, end of node) the youngest, the first position the oldest of them.
void RadixTree::touch_window(Node* node, int64_t start) {
  LruLink* next = &window_lru_;
  for (; node->parent != nullptr && node->start >= start; node = node->parent) {
    Window* window = node->window.get();
    if (window == nullptr || window->locks > 0) continue;
    window->used = clock_;
    unlink(window);
    link_before(window, next);
    next = window;
  }
}

// The window's part of a split: every lock that covered `lower` covers both.
void RadixTree::split_window(Node* upper, Node* lower) {
  std::vector<int32_t>& slots = lower->window->slots;
  const auto cut = slots.begin() + upper->length();
  upper->window = std::make_unique<Window>();
  upper->window->node = upper;
  upper->window->slots.assign(slots.begin(), cut);
  upper->window->used = lower->window->used;
  upper->window->locks = lower->window->locks;
  slots = std::vector<int32_t>(cut, slots.end());
  if (upper->window->locks == 0) link_before(upper->window.get(), lower->window.get());
}

void RadixTree::check_window() const {
  const auto require = [](bool ok, const char* what, int64_t id) {
    if (!ok) throw std::logic_error(std::string(what) + " (node " + std::to_string(id) + ")");
  };
  int64_t num_with_window = 0;
  for (const auto& [id, node] : nodes_) num_with_window += node->window != nullptr;
  int64_t evictable = 0;
  const Window* before = nullptr;
  for (const LruLink* link = window_lru_.next; link != &window_lru_; link = link->next) {
    const Window* window = static_cast<const Window*>(link);
    require(window->node->window.get() == window && window->locks == 0,
            "the window's list must hold unlocked window slots", window->node->id);
    require(before == nullptr || before->used < window->used ||
                (before->used == window->used && before->node->start < window->node->start),
            "the window's list must hold the least recently used slots first", window->node->id);
    before = window;
    evictable += window->node->length();
    --num_with_window;
  }
  int64_t locked = 0;
  for (const auto& [id, node] : nodes_) {
    if (!node->window) continue;
    require(window_ > 0, "a tree without a window must have no window slots", id);
    require(node->window->slots.size() == node->slots.size(), "a node must have a window slot for every token", id);
    require(node->window->locks >= 0 && node->window->node == node.get(), "window slots must know their node", id);
    if (node->window->locks == 0) continue;
    require(node->is_locked(), "a window lock must have a full lock beside it", id);
    locked += node->length();
    --num_with_window;
  }
  require(num_with_window == 0, "window slots must be locked or in the window's list", kRootId);
  require(evictable == window_evictable_ && locked == window_locked_, "window counters must be sums", kRootId);
}

}  // namespace gristmill::host
