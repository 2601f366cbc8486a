//! Output rows of several entries at once.

use super::*;

/// llama.cpp orders the rows of a batch by its ubatches, and brings them into the order of the entries when the first is
/// asked for.
#[test]
fn rows_of_several_entries_are_those_of_each() {
    let sample = Sample::new("rows", &written(&RandomModelShape::tiny_recurrent()));
    let source = ModelSource::File(sample.0.clone());
    let recurrent = load("rows", &source, &options(), &mut |_| true).unwrap();
    let [own, unified] = layouts();
    for mut model in [own, unified, recurrent] {
        let mut batch = Vec::new();
        for (slot, tokens) in [(2, 12), (0, 3), (3, 12), (1, 7)] {
            model.open(slot, &opening());
            batch.extend(entries(slot, 0, &TEXT[..tokens]));
        }
        model.decode(&batch, Time::ZERO).unwrap();
        let indexes: Vec<usize> = (0..batch.len()).filter(|&at| batch[at].row).collect();
        let rows = model.rows(&indexes).into_iter();
        let rows: Vec<Vec<f32>> = rows.map(|row| row.unwrap().to_vec()).collect();
        for (&index, row) in indexes.iter().zip(&rows) {
            assert_eq!(row.len(), 288);
            assert_eq!(row, &row_at(&mut model, index));
        }
        assert_ne!(rows[0], rows[1]);
        // Written through one of them, read from the other: each is the context's own row.
        if let Some(row) = &mut model.rows(&indexes[1..])[0] {
            row[5] = 77.0;
        }
        assert_eq!(row_at(&mut model, indexes[1])[5], 77.0);
        // No row is given twice, and none to an entry that wanted none.
        let given = |model: &mut Embedded, indexes: &[usize]| -> Vec<bool> {
            let rows = model.rows(indexes);
            rows.iter().map(Option::is_some).collect()
        };
        assert_eq!(given(&mut model, &[0, indexes[0]]), [false, true]);
        let twice = [indexes[1], indexes[1], indexes[2]];
        assert_eq!(given(&mut model, &twice), [true, false, true]);
    }
}
