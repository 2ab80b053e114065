// A radix tree from token prefixes to KV-cache slots: what a scheduler asks "which part of this prompt is computed
// already?". It owns slot numbers, not memory, knows nothing of Python or torch, and is not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gristmill::host {

using Tokens = std::span<const int32_t>;

// Which unlocked leaf goes first. `used` is the time of the last match, insert or unlock that covered the node; no two
// leaves ever share it, so every order is strict.
enum class Eviction {
  kLru,       // (used)
  kLfu,       // (uses, used): uses counts the insert that made the node and every match that covered it
  kFifo,      // (created)
  kPriority,  // (priority, used): the largest priority of the inserts that covered the node
  kSlru,      // (uses > 1, used): used once is on probation, used again is protected
};

Eviction eviction_named(std::string_view name);

// Prefixes are kept at token granularity in whole pages: every node holds a positive multiple of `page_size` tokens.
//
// Node ids are stable. An id names the prefix that ends at its node; a later split gives the upper part a new id, so a
// lock held on an id always covers the same tokens. Ids are never reused: one that was evicted or cleared away is an
// error, never another node.
//
// Eviction order, lru. All unlocked nodes are in one list, least recently used first, in which a node stands before all
// its ancestors (a touch moves a path to the end from the leaf upwards). The head is therefore always a leaf, and
// leaf-first LRU is O(1) a node. The other policies keep the unlocked leaves in an ordered set, O(log n) a change; a
// parent enters it when its last child leaves the tree.
//
// All tokens of a node have the same history: whatever touches a part of a node splits it there first.
//
// Sliding window (radix_tree_window.cpp). The layers with a sliding window have a pool of their own, so a token may
// have a second slot, its window slot. A node has window slots for all its tokens or for none. They may go while the
// full-attention slots stay; a prefix is usable when its last `window` tokens have theirs.
class RadixTree {
 public:
  static constexpr int64_t kRootId = 0;  // the empty prefix, of every namespace; locking it does nothing

  struct Match {
    int64_t node;
    std::vector<int32_t> slots;
  };
  struct Path {
    int64_t length;
    std::vector<int64_t> nodes;  // root side first; the last may be matched in part
  };
  struct Insertion {
    int64_t node;
    int64_t num_present;
  };
  struct WindowMatch {
    int64_t node;
    std::vector<int32_t> slots;
    int64_t window_start;
    std::vector<int32_t> window_slots;  // of the tokens from window_start on
  };
  struct WindowInsertion {
    int64_t node;
    int64_t num_present;
    std::vector<int32_t> taken;  // start, end, start, end, ...: positions whose window slots were adopted
  };
  // One per insert that added something, one per evict or clear that removed something.
  struct Event {
    bool stored;
    std::optional<uint64_t> parent;  // of the first page; none where it has no predecessor
    std::vector<uint64_t> pages;     // removed: deepest first, so that a page never goes before its successors
    std::vector<int32_t> tokens;
    std::string extra_key;
  };

  explicit RadixTree(int64_t page_size, Eviction eviction = Eviction::kLru, int64_t window = 0, bool events = false);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  Match match(Tokens ids, const std::string& extra_key);
  int64_t match_length(Tokens ids, const std::string& extra_key) const;
  Path match_path(Tokens ids, const std::string& extra_key) const;
  Insertion insert(Tokens ids, Tokens slots, const std::string& extra_key, int64_t priority = 0);
  void lock(int64_t node_id);
  void unlock(int64_t node_id);
  std::vector<int32_t> evict(int64_t num_tokens);
  std::vector<int32_t> clear();
  std::vector<Event> take_events() { return std::exchange(events_, {}); }

  WindowMatch match_window(Tokens ids, const std::string& extra_key);
  int64_t match_window_length(Tokens ids, const std::string& extra_key) const;
  WindowInsertion insert_window(Tokens ids, Tokens slots, int64_t window_start, Tokens window_slots,
                                const std::string& extra_key, int64_t priority = 0);
  void lock_window(int64_t node_id, int64_t start, int64_t end);
  void unlock_window(int64_t node_id, int64_t start, int64_t end);
  std::vector<int32_t> evict_window(int64_t num_tokens);
  std::vector<int32_t> take_freed_window() { return std::exchange(freed_window_, {}); }

  std::vector<int32_t> all_slots() const;
  std::vector<int32_t> all_window_slots() const;
  void check() const;
  int64_t memory_bytes() const;

  int64_t page_size() const { return page_size_; }
  int64_t window() const { return window_; }
  int64_t evictable() const { return evictable_; }
  int64_t locked() const { return locked_; }
  int64_t size() const { return evictable_ + locked_; }
  int64_t window_evictable() const { return window_evictable_; }
  int64_t window_locked() const { return window_locked_; }
  int64_t window_size() const { return window_evictable_ + window_locked_; }
  int64_t node_count() const { return static_cast<int64_t>(nodes_.size()); }

 private:
  struct LruLink {
    LruLink* prev = nullptr;
    LruLink* next = nullptr;
  };
  struct Node;

  // The window slots of a node; in the window's eviction order while `locks` is 0.
  struct Window : LruLink {
    Node* node = nullptr;
    std::vector<int32_t> slots;
    int64_t used = 0;
    int64_t locks = 0;  // lock_window minus unlock_window of these positions
  };

  struct Node : LruLink {
    int64_t id = kRootId;
    Node* parent = nullptr;  // null for the root of a namespace
    int64_t start = 0;       // position of the first token
    std::vector<int32_t> tokens;
    std::vector<int32_t> slots;
    std::vector<uint64_t> pages;                        // chain hash of each page; only with events
    std::unordered_multimap<uint64_t, Node*> children;  // by the hash of the child's first page
    int64_t locks = 0;                                  // lock() minus unlock() of this very node
    int64_t locked_children = 0;
    int64_t created = 0;
    int64_t used = 0;
    int64_t uses = 0;
    int64_t priority = 0;
    std::unique_ptr<Window> window;

    bool is_locked() const { return locks > 0 || locked_children > 0; }
    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
    int64_t end() const { return start + length(); }
  };

  struct Root : Node {
    std::string extra_key;
  };

  struct Position {
    Node* node;
    int64_t length;  // tokens from the root to the end of `node`
  };
  struct ConstPosition {
    const Node* node;  // the node that holds the last of the `length` tokens, null if there is none
    int64_t length;
  };
  struct EvictsBefore {
    Eviction eviction;
    bool operator()(const Node* left, const Node* right) const;
  };

  int64_t whole_pages(int64_t num_tokens) const { return num_tokens - num_tokens % page_size_; }
  int64_t pages_to_evict(int64_t num_tokens, int64_t evictable) const;
  uint64_t page_hash(const int32_t* page) const;
  Node* find_child(const Node& parent, const int32_t* page) const;
  int64_t common_pages(const Node& node, Tokens ids) const;
  Root* find_root(const std::string& extra_key) const;
  Node& node_of(int64_t id) const;

  Position descend(Node* root, Tokens ids);
  static void require_slots(Tokens slots, const char* name);
  Position adopt(Tokens ids, Tokens slots, const std::string& extra_key, int64_t priority);
  Node* new_node(Node* parent, Tokens tokens, Tokens slots);
  Node* split(Node* lower, int64_t length);
  void split_at(Node* node, int64_t position);
  void touch(Node* node, bool matched, int64_t priority);
  void remove_leaf(Node* leaf);
  std::vector<int32_t> slots_to(const Node* node) const;

  void order(Node* node);
  void unorder(Node* node);
  Node* next_to_evict() const;

  std::vector<uint64_t> chain_hashes(uint64_t before, Tokens tokens) const;
  uint64_t hash_before(const Node& node) const;
  void record_stored(const Node& node);
  void record_removed(const Node& node, int64_t kept);

  ConstPosition usable_prefix(Tokens ids, const std::string& extra_key) const;
  void require_window() const;
  Node* window_range(int64_t node_id, int64_t start, int64_t end) const;
  Node* cut_out(Node* node, int64_t start, int64_t end);
  void give_window(Node* node, Tokens slots);
  void drop_window(Node* node, int64_t kept);
  void touch_window(Node* node, int64_t start);
  void split_window(Node* upper, Node* lower);
  void check_window() const;

  static void unlink(LruLink* link);
  static void link_before(LruLink* link, LruLink* next);

  const int64_t page_size_;
  const Eviction eviction_;
  const int64_t window_;
  const bool has_events_;
  int64_t next_id_ = kRootId + 1;
  int64_t clock_ = 0;  // operations that touched something
  int64_t evictable_ = 0;
  int64_t locked_ = 0;
  int64_t window_evictable_ = 0;
  int64_t window_locked_ = 0;
  // Flat ownership: destroying a chain of any depth is a loop over this table.
  std::unordered_map<int64_t, std::unique_ptr<Node>> nodes_;
  std::unordered_map<std::string, std::unique_ptr<Root>> roots_;  // only namespaces that hold something
  LruLink lru_;                                                   // sentinel: next is the oldest, prev the newest
  std::set<Node*, EvictsBefore> leaves_;                          // every policy but lru: the unlocked leaves
  LruLink window_lru_;                                            // sentinel of the nodes with unlocked window slots
  std::vector<int32_t> freed_window_;
  std::vector<Event> events_;
};

}  // namespace gristmill::host
