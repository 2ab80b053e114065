// A radix tree from token prefixes to KV-cache slots: what a scheduler asks "which part of this prompt is computed
// already?". It owns slot numbers, not memory, knows nothing of Python or torch, and is not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace gristmill::host {

using Tokens = std::span<const int32_t>;

// Prefixes are kept at token granularity in whole pages: every node holds a positive multiple of `page_size` tokens.
//
// Node ids are stable. An id names the prefix that ends at its node; a later split gives the upper part a new id, so a
// lock held on an id always covers the same tokens. Ids are never reused: one that was evicted or cleared away is an
// error, never another node.
//
// Eviction order. All unlocked nodes are in one list, least recently used first, in which a node stands before all its
// ancestors (a touch moves a path to the end from the leaf upwards). The head is therefore always a leaf, and
// leaf-first LRU is O(1) a node.
class RadixTree {
 public:
  static constexpr int64_t kRootId = 0;  // the empty prefix, of every namespace; locking it does nothing

  struct Match {
    int64_t node;
    std::vector<int32_t> slots;
  };
  struct Insertion {
    int64_t node;
    int64_t num_present;
  };

  explicit RadixTree(int64_t page_size);
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  Match match(Tokens ids, const std::string& extra_key);
  int64_t match_length(Tokens ids, const std::string& extra_key) const;
  Insertion insert(Tokens ids, Tokens slots, const std::string& extra_key);
  void lock(int64_t node_id);
  void unlock(int64_t node_id);
  std::vector<int32_t> evict(int64_t num_tokens);
  std::vector<int32_t> clear();

  std::vector<int32_t> all_slots() const;
  void check() const;

  int64_t page_size() const { return page_size_; }
  int64_t evictable() const { return evictable_; }
  int64_t locked() const { return locked_; }
  int64_t size() const { return evictable_ + locked_; }
  int64_t node_count() const { return static_cast<int64_t>(nodes_.size()); }

 private:
  struct LruLink {
    LruLink* prev = nullptr;
    LruLink* next = nullptr;
  };

  struct Node : LruLink {
    int64_t id = kRootId;
    Node* parent = nullptr;  // null for the root of a namespace
    std::vector<int32_t> tokens;
    std::vector<int32_t> slots;
    std::unordered_multimap<uint64_t, Node*> children;  // by the hash of the child's first page
    int64_t locks = 0;                                  // lock() minus unlock() of this very node
    int64_t locked_children = 0;

    bool is_locked() const { return locks > 0 || locked_children > 0; }
    int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  };

  struct Root : Node {
    std::string extra_key;
  };

  struct Position {
    Node* node;
    int64_t length;  // tokens from the root to the end of `node`
  };

  int64_t whole_pages(int64_t num_tokens) const { return num_tokens - num_tokens % page_size_; }
  uint64_t page_hash(const int32_t* page) const;
  Node* find_child(const Node& parent, const int32_t* page) const;
  int64_t common_pages(const Node& node, Tokens ids) const;
  Root* find_root(const std::string& extra_key) const;
  Node& node_of(int64_t id) const;

  Position descend(Node* root, Tokens ids);
  Node* new_node(Node* parent, Tokens tokens, Tokens slots);
  Node* split(Node* lower, int64_t length);
  void touch(Node* node);
  void remove_leaf(Node* leaf);

  static void unlink(LruLink* link);
  static void link_before(LruLink* link, LruLink* next);

  int64_t page_size_;
  int64_t next_id_ = kRootId + 1;
  int64_t evictable_ = 0;
  int64_t locked_ = 0;
  // Flat ownership: destroying a chain of any depth is a loop over this table.
  std::unordered_map<int64_t, std::unique_ptr<Node>> nodes_;
  std::unordered_map<std::string, std::unique_ptr<Root>> roots_;  // only namespaces that hold something
  LruLink lru_;                                                   // sentinel: next is the oldest, prev the newest
};

}  // namespace gristmill::host
