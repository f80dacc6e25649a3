"""What a model is made of: configuration, file sizes and headers, read as data from wherever they live."""
