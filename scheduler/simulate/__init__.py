"""What plans do in time: all ranks as arrays (`lower`), run by `simulator`, which is the specification, or its compiled twin."""
