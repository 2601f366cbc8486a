use super::*;

fn read(text: &str) -> Result<&str, &'static str> {
    match value(text) {
        Ok((value, _)) => Ok(value.as_str()),
        Err(BadJson(what)) => Err(what),
    }
}

#[test]
fn lm_205_values_are_read_as_they_were_sent() {
    for text in [
        "null",
        "true",
        "0",
        "-0",
        "1.50",
        "1e5",
        "-1.0E+7",
        "NaN",
        "Infinity",
        "-Infinity",
        "\"\"",
        "\"\\u00e9\\n\"",
        "[]",
        "[ 1 , [2],{} ]",
        "{\"a\" :1,\"a\":2}",
        "\"\u{1f333}\"",
    ] {
        assert_eq!(read(&format!(" {text} ")), Ok(text));
    }
}

#[test]
fn lm_201_invalid_json_is_refused() {
    for text in [
        "",
        " ",
        "nul",
        "nan",
        "inf",
        "+1",
        "01",
        "1.",
        ".5",
        "1e",
        "-",
        "- 1",
        "1x",
        "'a'",
        "\"",
        "\"\\",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\n\"",
        "[",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        "{",
        "{1:2}",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\":1",
        "}",
        "]",
        "-Inf",
        "True",
        "None",
    ] {
        assert!(read(text).is_err(), "{text}");
    }
    assert_eq!(read("{\"model\":"), Err("EOF while parsing a value"));
}

#[test]
fn lm_205_nesting_is_limited_to_64_levels() {
    let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
    assert!(read(&nested(DEPTH_MAX)).is_ok());
    assert_eq!(
        read(&nested(DEPTH_MAX + 1)),
        Err("nested deeper than 64 levels")
    );
    assert!(
        read(&"[".repeat(1_000_000)).is_err(),
        "and no stack is spent"
    );
}

#[test]
fn lm_205_numbers_and_bare_words_are_converted() {
    let integer = |text| value(text).unwrap().0.integer();
    assert_eq!(integer("16.0"), Some(16));
    assert_eq!(integer("1e3"), Some(1_000));
    assert_eq!(integer("18446744073709551615"), Some(i128::from(u64::MAX)));
    assert_eq!(integer("1e300"), Some(i128::MAX));
    for none in ["1.5", "NaN", "Infinity", "\"1\"", "true", "null", "[1]"] {
        assert_eq!(integer(none), None, "{none}");
    }
    let number = |text| value(text).unwrap().0.number();
    assert_eq!(number("-Infinity"), Some(f64::NEG_INFINITY));
    assert!(number("NaN").is_some_and(f64::is_nan));
    assert_eq!(number("\"NaN\""), None, "a word in quotes is none");
}

#[test]
fn lm_205_all_members_and_elements_are_iterated_in_order() {
    let (object, rest) =
        value("{ \"a\" : [1, \"}\"] , \"\\u0062\":{\"x\":1},\"a\":2 } \nrest").unwrap();
    let members: Vec<_> = object
        .members()
        .unwrap()
        .map(|(name, value)| (name.into_owned(), value.as_str()))
        .collect();
    let expected = [("a", "[1, \"}\"]"), ("b", "{\"x\":1}"), ("a", "2")];
    assert_eq!(
        members,
        expected.map(|(name, value)| (name.to_owned(), value))
    );
    assert_eq!(rest, " \nrest");
    let list = value("[ 1 ,[2,3],\"a,b\" ]").unwrap().0;
    let elements: Vec<_> = list.elements().unwrap().map(RawValue::as_str).collect();
    assert_eq!(elements, ["1", "[2,3]", "\"a,b\""]);
}

/// The second, unchecked scan of a value finds the same ends.
#[test]
fn lm_205_nested_values_end_where_the_first_scan_found_them() {
    for inner in [
        r#""a\\\"}]""#,
        r#"{"]" : [ {"}":"\\"} , -Infinity,1e5 ] , "" :{} }"#,
        "[]",
        "[ [ ] ,\t[{}]\r\n]",
        "-0.5E+7",
        "NaN",
        "null",
        r#""\u0022\/ü""#,
    ] {
        let list = format!("[{inner}, {inner} ,{inner}]");
        let (list, rest) = value(&list).unwrap();
        let elements: Vec<_> = list.elements().unwrap().map(RawValue::as_str).collect();
        assert_eq!((elements, rest), (vec![inner; 3], ""));
        let object = format!(r#"{{"x":{inner},"\u0079" : {inner} }}"#);
        let (object, _) = value(&object).unwrap();
        let members: Vec<_> = object.members().unwrap().collect();
        let members: Vec<_> = members
            .iter()
            .map(|(name, value)| (&**name, value.as_str()))
            .collect();
        assert_eq!(members, [("x", inner), ("y", inner)]);
    }
}

#[test]
fn an_unpaired_surrogate_is_not_a_string() {
    assert_eq!(value("\"\\ud83c\"").unwrap().0.string(), None);
    assert_eq!(
        value("\"\\ud83c\\udf33\"").unwrap().0.string().as_deref(),
        Some("\u{1f333}")
    );
}
