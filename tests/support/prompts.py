"""24 prompts of mixed kinds and lengths; every third begins with the same long instruction, for a prefix cache to find."""

SHARED = (
    "You are a careful assistant in a small library. You answer in plain words, you never invent a source, and when you do not "
    "know something you say so. The library has seven rooms, and each room has its own keeper. A visitor comes in and asks: "
)

PROMPTS = [
    SHARED + "Where do I find books about rivers?",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    SHARED + "Who keeps the room of maps?",
    "The three laws of motion are:\n1.",
    "Water boils at one hundred degrees because",
    SHARED + "Why is it so quiet in here?",
    "Q: What do bees make?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    SHARED + "May I take this dictionary home?",
    "Les trois plus grandes villes de France sont",
    "Shopping list:\n- milk\n- eggs\n-",
    SHARED + "How many rooms are there, and which is the oldest?",
    "import numpy as np\n\n# compute the mean of each row\n",
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when",
    SHARED + "I lost my umbrella. What should I do?",
    "A haiku about autumn:\n",
    "SELECT name, count(*) FROM visitors",
    SHARED + "Can you recommend a story for a child of five?",
    "1, 1, 2, 3, 5, 8, 13,",
    "The recipe needs two cups of flour, a pinch of salt and",
    SHARED + "What is the difference between a novel and a novella?",
    "Breaking news: scientists have discovered",
    "To change a bicycle tyre, first",
]
