"""From layers to launches: which layers run as one, where everything lies in DRAM, and the Program of it all."""
