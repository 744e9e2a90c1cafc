"""Plain and merged images of a model beside each other, for `compare`, and the result files of every measurement."""
