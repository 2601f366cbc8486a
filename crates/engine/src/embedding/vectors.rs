//! [`Vectors`]: the rows of a request.

/// One row of equal width for each text of a request, in the order in which they were given. For a rerank request the rows are
/// the scores of the documents.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vectors {
    /// Numbers of a row; at least 1.
    pub width: usize,
    /// All rows, one after the other.
    pub numbers: Vec<f32>,
    /// Tokens of all texts, special ones included.
    pub prompt_tokens: u32,
}

impl Vectors {
    /// Iterates over the rows.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.numbers.chunks_exact(self.width.max(1))
    }
}

/// What becomes of the model's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowShape {
    /// Numbers that are kept of each.
    pub(super) width: usize,
    /// Scale what is kept to length 1.
    pub(super) normalize: bool,
}

impl RowShape {
    /// Writes what is kept of a row. False if it is not made of numbers.
    pub(super) fn write(self, row: &[f32], into: &mut [f32]) -> bool {
        let kept = &row[..self.width.min(row.len())];
        into.copy_from_slice(kept);
        if !kept.iter().all(|number| number.is_finite()) {
            return false;
        }
        if self.normalize {
            normalize(into);
        }
        true
    }
}

/// Scales to length 1. A row of zeros has no direction and stays.
#[expect(
    clippy::cast_possible_truncation,
    reason = "each quotient is at most 1"
)]
fn normalize(row: &mut [f32]) {
    // In 64 bits: the squares of large numbers do not fit in 32.
    let squares = row.iter().map(|number| f64::from(*number).powi(2));
    let length = squares.sum::<f64>().sqrt();
    if length > 0.0 {
        for number in row {
            *number = (f64::from(*number) / length) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_before_they_are_scaled_to_length_1() {
        let shape = |width, normalize| RowShape { width, normalize };
        for (row, shape, expect) in [
            (&[3.0, 4.0, 12.0][..], shape(2, true), &[0.6, 0.8][..]),
            (&[3.0, 4.0], shape(2, false), &[3.0, 4.0]),
            (&[0.0, 0.0], shape(2, true), &[0.0, 0.0]),
            (&[1.5e38, 2e38], shape(2, true), &[0.6, 0.8]),
        ] {
            let mut kept = vec![9.0; shape.width];
            assert!(shape.write(row, &mut kept), "{row:?}");
            let near = |(left, right): (&f32, &f32)| (left - right).abs() < 1e-6;
            assert!(kept.iter().zip(expect).all(near), "{row:?}: {kept:?}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(!shape(2, true).write(&[1.0, bad], &mut [0.0; 2]));
        }
    }
}
