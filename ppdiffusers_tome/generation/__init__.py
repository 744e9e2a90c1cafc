"""Many images from a list of prompts, without a server: in this process or on Ray; a killed run can be resumed."""
