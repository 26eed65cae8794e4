"""meshnode: a volunteer peer-to-peer mesh that runs language models too large for any one of its machines."""
