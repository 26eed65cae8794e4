"""What a node offers to the programs of its own machine: requests, the control server, and its client."""
