//! Selects a model among the files of a repository: by file name, by quantisation, or the usual one; with all parts of a
//! split file.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{EXTENSION, ModelChoice, is_gguf};

/// The paths of a model's parts in order; one, if the file is not split.
///
/// # Errors
/// Why there is none, with what there is.
pub(super) fn select(files: &[&str], choice: &ModelChoice) -> Result<Vec<String>, String> {
    // Here and not by the groups: also a file that is no model, such as a projector, can be named.
    if let ModelChoice::File(path) = choice
        && files.contains(&path.as_str())
    {
        return parts(path, files);
    }
    let models = models(files);
    if models.is_empty() {
        return Err(
            "the repository has no GGUF files; look for one whose name ends in -GGUF".into(),
        );
    }
    let path = match choice {
        ModelChoice::File(path) => return Err(no_file(path, &models)),
        ModelChoice::Quantisation(name) => {
            of_quantisation(&models, name).ok_or_else(|| no_quantisation(name, &models))?
        }
        ModelChoice::Usual => USUAL
            .iter()
            .find_map(|name| of_quantisation(&models, name))
            .or_else(|| models.first().copied())
            .unwrap_or_default(),
    };
    parts(path, files)
}

/// The first file of each model.
fn models<'a>(files: &[&'a str]) -> Vec<&'a str> {
    let is_model = |path: &&&str| {
        let name = file_name(path).to_ascii_lowercase();
        is_gguf(path) && !OTHER_FILES.iter().any(|other| name.contains(other))
    };
    let mut first = BTreeMap::new();
    for path in files.iter().filter(is_model) {
        let key = SplitName::read(path).map_or(*path, |split| split.prefix);
        let known = first.entry(key).or_insert(*path);
        *known = (*known).min(path);
    }
    let mut models: Vec<_> = first.into_values().collect();
    // Of two that fit, the plainer name: not `imatrix/…` or `UD-…`.
    models.sort_by_key(|path| (path.matches('/').count(), path.len(), *path));
    models
}

fn of_quantisation<'a>(models: &[&'a str], name: &str) -> Option<&'a str> {
    let exact = |path: &&&str| quantisation(path).is_some_and(|its| its.eq_ignore_ascii_case(name));
    let found = models.iter().find(exact);
    let found = found.or_else(|| models.iter().find(|path| mentions(path, name)));
    found.copied()
}

/// The quantisation in a file name: the last of its words that looks like one.
fn quantisation(path: &str) -> Option<&str> {
    let name = file_name(path);
    let stem = SplitName::read(name).map_or_else(
        || &name[..name.len().saturating_sub(EXTENSION.len())],
        |split| split.prefix,
    );
    let mut end = stem.len();
    // Words from the last one on; `.` and `-` separate them, and `_` is part of a quantisation's name.
    loop {
        let start = stem[..end].rfind(['-', '.']).map_or(0, |at| at + 1);
        if looks_quantised(&stem[start..end]) {
            // Unsloth's dynamic quantisations have two words.
            let prefix = stem[..start].len().checked_sub(3).unwrap_or(start);
            let is_dynamic = stem.get(prefix..start).is_some_and(|word| word == "UD-");
            return Some(&stem[if is_dynamic { prefix } else { start }..end]);
        }
        end = start.checked_sub(1)?;
    }
}

fn looks_quantised(word: &str) -> bool {
    let word = word.to_ascii_uppercase();
    let numbered = |prefix| {
        let rest = word.strip_prefix(prefix).unwrap_or_default();
        rest.starts_with(|c: char| c.is_ascii_digit())
    };
    ["Q", "IQ", "TQ", "MXFP", "NVFP"].into_iter().any(numbered)
        || matches!(&*word, "F16" | "BF16" | "F32" | "FP16")
}

/// Whether the words of `name` are in a path, between characters that are no letters or digits.
fn mentions(path: &str, name: &str) -> bool {
    let (path, name) = (path.to_ascii_lowercase(), name.to_ascii_lowercase());
    path.match_indices(&name).any(|(at, _)| {
        let before = path[..at].chars().next_back();
        let after = path[at + name.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric)
            // `Q4_K` is not in `Q4_K_M`.
            && !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

/// All parts of the file that `path` belongs to.
fn parts(path: &str, files: &[&str]) -> Result<Vec<String>, String> {
    let Some(split) = SplitName::read(path) else {
        return Ok(vec![path.to_owned()]);
    };
    let all: Vec<String> = split.parts().collect();
    let there: BTreeSet<_> = files.iter().copied().collect();
    match all.iter().find(|part| !there.contains(part.as_str())) {
        Some(missing) => Err(format!(
            "the repository lacks {missing}, a part of this model"
        )),
        None => Ok(all),
    }
}

/// The name of a part of a split file: `PREFIX-00001-of-00003.gguf`.
pub(super) struct SplitName<'a> {
    prefix: &'a str,
    total: u32,
    /// `.gguf` in the file's own spelling.
    extension: &'a str,
}

impl<'a> SplitName<'a> {
    /// The name that a path or the path of a URL ends in, if it is one of a part.
    pub(super) fn read(path: &'a str) -> Option<Self> {
        if !is_gguf(path) {
            return None;
        }
        let (rest, extension) = path.split_at_checked(path.len() - EXTENSION.len())?;
        let (rest, total) = rest.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let read = |text: &str| {
            let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            is_number.then(|| text.parse::<u32>().ok()).flatten()
        };
        let (number, total) = (read(number)?, read(total)?);
        (1..=total.min(PARTS_MAX))
            .contains(&number)
            .then_some(Self {
                prefix,
                total,
                extension,
            })
            .filter(|split| split.total <= PARTS_MAX)
    }

    /// The paths of all parts.
    pub(super) fn parts(&self) -> impl Iterator<Item = String> {
        let Self {
            prefix,
            total,
            extension,
        } = self;
        (1..=*total).map(move |number| format!("{prefix}-{number:05}-of-{total:05}{extension}"))
    }
}

fn no_file(path: &str, models: &[&str]) -> String {
    let mut near: Vec<_> = models.iter().take(COMPARED_MAX).copied().collect();
    near.sort_by_cached_key(|there| distance(there, path));
    let shown: Vec<_> = near.iter().take(SHOWN_MAX).copied().collect();
    format!(
        "the repository has no file {path}; there are: {}",
        listed(&shown, models.len())
    )
}

/// How far two names are from each other. The time that it takes grows with the product of their lengths, so only
/// their beginnings are compared.
pub(super) fn distance(one: &str, other: &str) -> usize {
    let cut = |name: &str| name.chars().take(COMPARED_CHARS_MAX).collect::<String>();
    strsim::damerau_levenshtein(&cut(one), &cut(other))
}

fn no_quantisation(name: &str, models: &[&str]) -> String {
    let known: BTreeSet<_> = models
        .iter()
        .filter_map(|path| quantisation(path))
        .collect();
    if known.is_empty() {
        let shown: Vec<_> = models.iter().take(SHOWN_MAX).copied().collect();
        let there = listed(&shown, models.len());
        return format!("the repository has no file with {name} in its name; there are: {there}");
    }
    let shown: Vec<_> = known.iter().take(SHOWN_MAX).copied().collect();
    let there = listed(&shown, known.len());
    format!("the repository has no quantisation {name}; there are: {there}")
}

fn listed(shown: &[&str], all: usize) -> String {
    let more = all - shown.len();
    let more = if more > 0 {
        format!(", and {more} more")
    } else {
        String::new()
    };
    shown.join(", ") + &more
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The quantisations that are used if none is named, the first first: as llama.cpp does.
const USUAL: [&str; 2] = ["Q4_K_M", "Q8_0"];
/// GGUF files that are no language models: vision projectors, and data for quantising.
const OTHER_FILES: [&str; 2] = ["mmproj", "imatrix"];
/// The maximum of parts of a split file: all are open at the same time.
const PARTS_MAX: u32 = 256;
/// The maximum of names that are compared for an error.
const COMPARED_MAX: usize = 1_000;
const COMPARED_CHARS_MAX: usize = 100;
/// The maximum of names in an error.
const SHOWN_MAX: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn quant(name: &str) -> ModelChoice {
        ModelChoice::Quantisation(name.into())
    }

    fn selected(files: &[&str], choice: &ModelChoice) -> String {
        select(files, choice)
            .unwrap_or_else(|why| vec![why])
            .join(" ")
    }

    const FILES: [&str; 8] = [
        "README.md",
        "mmproj-m-Q8_0.gguf",
        "m-IQ2_XS.gguf",
        "m-UD-Q4_K_M.gguf",
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "BF16/m-BF16-00002-of-00002.gguf",
        "BF16/m-BF16-00001-of-00002.gguf",
    ];
    const SPLIT: &str = "BF16/m-BF16-00001-of-00002.gguf BF16/m-BF16-00002-of-00002.gguf";

    #[test]
    fn a_quantisation_is_found_in_file_names() {
        for (name, expect) in [
            ("q4_k_m", "m-Q4_K_M.gguf"),
            ("UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
            ("Q4_K_S", "m-Q4_K_S.gguf"),
            ("bf16", SPLIT),
        ] {
            assert_eq!(selected(&FILES, &quant(name)), expect, "{name}");
        }
        let error = select(&FILES, &quant("Q4_K")).unwrap_err();
        assert_eq!(
            error,
            "the repository has no quantisation Q4_K; there are: BF16, IQ2_XS, Q4_K_M, Q4_K_S, UD-Q4_K_M"
        );
        for (path, expect) in [
            ("llama-2-7b.Q5_K_M.gguf", Some("Q5_K_M")),
            ("ggml-model-q4_0.gguf", Some("q4_0")),
            ("a-Q8_0-instruct.gguf", Some("Q8_0")),
            ("gpt-oss-20b-MXFP4.gguf", Some("MXFP4")),
            ("x/Qwen2.5-0.5B.gguf", None),
            (".gguf", None),
            ("ü.gguf", None),
        ] {
            assert_eq!(quantisation(path), expect, "{path}");
        }
        // Where the name of the file says nothing, that of its folder does.
        assert_eq!(
            selected(&["Q3_K/m.gguf", "Q8_0/m.gguf"], &quant("q8_0")),
            "Q8_0/m.gguf"
        );
    }

    #[test]
    fn without_a_choice_the_usual_quantisation_is_selected() {
        for (files, expect) in [
            (&FILES[..], "m-Q4_K_M.gguf"),
            (&["m-F16.gguf", "m-q8_0.gguf"], "m-q8_0.gguf"),
            (&["m-F16.gguf", "m-F32.gguf", "mmproj.gguf"], "m-F16.gguf"),
            (&FILES[6..], SPLIT),
        ] {
            assert_eq!(selected(files, &ModelChoice::Usual), expect);
        }
        let error = select(&["README.md", "mmproj.gguf"], &ModelChoice::Usual).unwrap_err();
        assert!(error.contains("no GGUF files"), "{error}");
    }

    #[test]
    fn a_file_is_selected_with_all_its_parts() {
        let file = |path: &str| ModelChoice::File(path.into());
        assert_eq!(selected(&FILES, &file(FILES[6])), SPLIT);
        assert_eq!(selected(&FILES, &file(FILES[1])), FILES[1]);
        let error = select(&FILES, &file("m-Q4_K_X.gguf")).unwrap_err();
        assert!(
            error.contains("there are: m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
            "{error}"
        );
        // However many names there are, and however long.
        let long: Vec<String> = (0..5_000)
            .map(|at| format!("{at}-{}.gguf", "x".repeat(900)))
            .collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let error = select(&long, &file(&("y".repeat(900) + ".gguf"))).unwrap_err();
        assert!(error.ends_with(", and 4960 more"));
        assert_eq!(
            selected(&["mmproj.gguf"], &file("mmproj.gguf")),
            "mmproj.gguf"
        );
        let error = select(&FILES[..7], &quant("BF16")).unwrap_err();
        assert!(
            error.contains("lacks BF16/m-BF16-00001-of-00002.gguf"),
            "{error}"
        );
        for name in [
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
            "m-1-of-2.gguf",
            "m-00001-of-99999.gguf",
            "m-00001-of-00002.bin",
            "-of-.gguf",
        ] {
            assert!(SplitName::read(name).is_none(), "{name}");
        }
    }
}
