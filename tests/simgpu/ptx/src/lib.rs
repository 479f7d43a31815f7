//! A PTX parser and interpreter.
