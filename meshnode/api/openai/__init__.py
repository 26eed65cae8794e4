"""OpenAI's API as a mesh answers it: requests read, answers written, faults in its shape."""
